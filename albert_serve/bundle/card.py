"""The model card of a bundle: its manifest's figures and history, and its README.md's metadata."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from albert_serve.bundle.figures import is_number
from albert_serve.bundle.manifest import Manifest, needed_shapes
from albert_serve.config import AlbertConfig
from albert_serve.files import read_small_file

CARD_FILE: Final = "README.md"
_MAX_CARD_BYTES: Final = 1 << 20
# Reading takes some 0.1 s. libyaml would be faster, but lists in lists end its process.
_MAX_METADATA_CHARS: Final = 1 << 16
_FENCE: Final = "---\n"
_MAX_FIGURES: Final = 200
_MAX_STAGES: Final = 100
_MAX_NAMES: Final = 20
_MAX_CHARS: Final = 200
# The keys of a training stage, and of its settings, that name data.
_DATA_KEYS: Final = (
    *("corpus", "data", "pretraining", "text_classification", "question_answering"),
    "multiple_choice",
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
    return sum(math.prod(shape) for shape in needed_shapes(config, manifest).values())


def read_figures(manifest: Manifest) -> dict[str, float]:
    """Return the numbers among the results on held-out data, by name."""
    figures = {
        name: float(value) for name, value in manifest.evaluation.items() if is_number(value)
    }
    return dict(islice(figures.items(), _MAX_FIGURES))


def read_stages(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the stages of training: program, steps, tokens, seconds and data, as far as known.

    Before an average of several models stand the stages of all of them, each stage once.
    """
    stages = _distinct_stages(manifest.provenance.get("training"), [])
    return [_stage(stage) for stage in islice(stages, _MAX_STAGES)]


def _distinct_stages(history: object, seen: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the stages of a history, and of averaged models, that are not in `seen`; extend it."""
    recorded = history.get("stages") if isinstance(history, dict) else None
    for stage in recorded if isinstance(recorded, list) else []:
        if not isinstance(stage, dict) or stage in seen:
            continue
        averaged = stage.get("averaged")
        for other in averaged if isinstance(averaged, list) else []:
            yield from _distinct_stages(other, seen)
        seen.append(stage)
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
        "program": program[:_MAX_CHARS] if isinstance(program, str) else "unknown",
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
    shown = [name for name in names if isinstance(name, str) and name]
    return [name[:_MAX_CHARS] for name in shown[:_MAX_NAMES]]
