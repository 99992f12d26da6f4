"""The model card of a bundle: its manifest's figures and history, and its README.md's metadata."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

import yaml  # type: ignore[import-untyped]

from albert_serve.bundle.manifest import AGREEMENT, Manifest, needed_shapes
from albert_serve.config import AlbertConfig
from albert_serve.files import read_small_file

CARD_FILE: Final = "README.md"
_MAX_CARD_BYTES: Final = 1 << 20
# Reading takes some 0.1 s. libyaml would be faster, but lists in lists end its process.
_MAX_METADATA_CHARS: Final = 1 << 16
_FENCE: Final = "---\n"
# The keys of a training stage, and of its settings, that name data.
_DATA_KEYS: Final = (
    *("corpus", "data", "pretraining", "text_classification", "question_answering"),
    "multiple_choice",
)


# Names in `Manifest.evaluation`, which `albert-serve evaluate` gives: the beginning of a task's
# figures, the name of its count, and what makes a percentage of a figure.
_EVALUATED: Final[dict[str, tuple[str, str, float]]] = {
    "fill-mask": ("masked", "tokens", 100.0),
    "sentence-order": ("sentence_order", "pairs", 100.0),
    "text-classification": ("text_classification", "texts", 100.0),
    "multiple-choice": ("multiple_choice", "questions", 100.0),
    "question-answering": ("question_answering", "questions", 1.0),
}
# The figures by name, of which the first that a task has is shown. Of one label a text, Matthews'
# coefficient is there only where it is the official metric.
_METRICS: Final = (
    ("matthews_correlation", "Matthews correlation"),
    ("accuracy", "accuracy"),
    ("micro_f1", "micro-F1"),
    ("pearson", "Pearson"),
    ("spearman", "Spearman"),
    ("f1", "F1"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CardMetadata:
    """The metadata at the beginning of a model card, in the Hugging Face Hub's names."""

    license: str | None = None
    language: list[str] = field(default_factory=list)
    base_model: list[str] = field(default_factory=list)


def read_metadata(folder: Path) -> CardMetadata:
    """Return the metadata of a bundle's model card; it is empty where there is none to read."""
    try:
        text = read_small_file(folder / CARD_FILE, _MAX_CARD_BYTES).decode()
        # All scalars as text: the language `no` is not False.
        read = yaml.load(_front_matter(text), yaml.BaseLoader)  # noqa: S506
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return CardMetadata()
    metadata = read if isinstance(read, dict) else {}
    names = _names(metadata.get("license"))
    return CardMetadata(
        license=names[0] if names else None,
        language=_names(metadata.get("language")),
        base_model=_names(metadata.get("base_model")),
    )


def count_parameters(config: AlbertConfig, manifest: Manifest) -> int:
    """Return the number of parameters of the backbone and the heads; shared ones count once."""
    return sum(math.prod(shape) for shape in needed_shapes(config, manifest.tasks).values())


def read_figures(manifest: Manifest) -> dict[str, float]:
    """Return the numbers among the results on held-out data, by name."""
    return {name: float(value) for name, value in manifest.evaluation.items() if is_number(value)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFigure:
    """A task's metric on labelled data.

    Attributes:
        metric: such as "accuracy" or "F1".
        percent: its value, at most 100; a correlation may be negative.
        count: the number of answers.
        data: the names of the files; None where they are not known.
    """

    metric: str
    percent: float
    count: int
    data: str | None = None


def read_figure(manifest: Manifest, head: str) -> TaskFigure | None:
    """Return a head's figure, of held-out data if there is one, else of export; None without.

    Agreement with torch is ignored: it says nothing about the answers.
    """
    figure = evaluated_figure(manifest.evaluation, head)
    if figure is not None:
        return figure
    measured = manifest.head_quality.get(head)
    if measured is None or measured.metric == AGREEMENT:
        return None
    return TaskFigure(
        metric=measured.metric,
        percent=measured.bundle,
        count=measured.count,
        data=", ".join(measured.data) or None,
    )


def evaluated_figure(evaluation: Mapping[str, Any], head: str) -> TaskFigure | None:
    """Return a head's figure of held-out data; None without."""
    task, _, name = head.partition("/")
    if task not in _EVALUATED:
        return None
    prefix, count_name, factor = _EVALUATED[task]
    prefix = f"{prefix}/{name}" if name else prefix
    count = evaluation.get(f"{prefix}_{count_name}")
    data = evaluation.get(f"{prefix}_data") or evaluation.get(f"{prefix}_task")
    for figure, metric in _METRICS:
        value = evaluation.get(f"{prefix}_{figure}")
        if is_number(value) and is_number(count):
            return TaskFigure(
                metric=metric,
                percent=factor * float(value),
                count=int(count),
                data=data if isinstance(data, str) else None,
            )
    return None


def read_stages(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the stages of training: program, steps, tokens, seconds and data, as far as known.

    Before an average of several models stand the stages of all of them, each stage once.
    """
    return [_stage(stage) for stage in _distinct_stages(manifest.provenance.get("training"), [])]


def _distinct_stages(
    history: object, earlier: list[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Yield the stages of a history and of averaged models not in `earlier`, and add them."""
    recorded = history.get("stages") if isinstance(history, dict) else None
    for stage in recorded if isinstance(recorded, list) else []:
        if not isinstance(stage, dict) or stage in earlier:
            continue
        averaged = stage.get("averaged")
        for other in averaged if isinstance(averaged, list) else []:
            yield from _distinct_stages(other, earlier)
        earlier.append(stage)
        yield stage


def _stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    counts = {
        key: round(stage[key])
        for key in ("steps", "tokens", "seconds")
        if is_number(stage.get(key))
    }
    settings = stage.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    data = [name for key in _DATA_KEYS for name in _names(stage.get(key) or settings.get(key))]
    program = stage.get("program")
    return {
        "program": program if isinstance(program, str) else "unknown",
        **counts,
        "data": data,
    }


def _front_matter(text: str) -> str:
    """Return the YAML between the first two fences.

    Raises:
        ValueError: it is too long.
    """
    text = text.replace("\r\n", "\n")
    if not text.startswith(_FENCE):
        return ""
    metadata = text.removeprefix(_FENCE).partition(f"\n{_FENCE}")[0]
    if len(metadata) > _MAX_METADATA_CHARS:
        raise ValueError(f"the metadata has more than {_MAX_METADATA_CHARS} characters")
    return metadata


def _names(value: object) -> list[str]:
    names = value if isinstance(value, list) else [value]
    return [name for name in names if isinstance(name, str) and name]


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a manifest is a finite number, of a size that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300
