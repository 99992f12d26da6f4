"""The description of a model, from its bundle's manifest and its model card's metadata."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeGuard

import yaml  # type: ignore[import-untyped]

from albert_serve.api.model_card import ModelCard, ModelSizes, metric_prefix
from albert_serve.api.schemas import (
    HeadInfo,
    InputExample,
    ModelDescription,
    SentenceVectorsInfo,
    TaskInfo,
    TaskQuality,
)
from albert_serve.bundle.manifest import (
    CARD_FILE,
    WEIGHTS_FILE,
    Manifest,
    head_name,
    needed_shapes,
)
from albert_serve.bundle.weights import CLASSIFICATION, task_of
from albert_serve.config import AlbertConfig
from albert_serve.files import read_small_file
from albert_serve.tasks import task_names
from albert_serve.tasks.text_classification import label_names

_MAX_CARD_BYTES: Final = 1 << 20
# Parsing 64 KiB takes about 0.1 s. libyaml would be faster, but deeply nested lists crash it.
_FRONT_MATTER: Final = re.compile(r"---\r?\n(.{0,65536}?\r?\n)---\r?\n", re.DOTALL)
# For each task: what its evaluation counts, and the factor that makes its metric a percentage.
_COUNTS: Final[Mapping[str, tuple[str, float]]] = {
    "fill-mask": ("tokens", 100.0),
    "sentence-order": ("pairs", 100.0),
    "text-classification": ("texts", 100.0),
    "token-classification": ("texts", 100.0),
    "question-answering": ("questions", 1.0),
}
# The first of these metrics that a head has is shown. If each text has one label, Matthews'
# coefficient is present only as the official metric.
_METRICS: Final = (
    ("matthews_correlation", "Matthews correlation"),
    ("accuracy", "accuracy"),
    ("micro_f1", "micro-F1"),
    ("pearson", "Pearson"),
    ("spearman", "Spearman"),
    ("f1", "F1"),
)


def describe(manifest: Manifest, name: str, folder: Path | None = None) -> ModelDescription:
    """Return the description of a model. Call this in a thread, because it reads the model card.

    Args:
        folder: folder of the model card, or None if there is none.
    """
    config = AlbertConfig.from_hf(manifest.config)
    metadata = {} if folder is None else read_metadata(folder)
    return ModelDescription(
        model_id=name,
        precision=manifest.precision,
        revision=manifest.revision,
        tasks=[_describe(task, manifest) for task in task_names(manifest)],
        max_positions=config.max_positions,
        card=ModelCard(
            **metadata,
            sizes=_sizes(config, manifest),
            evaluation={
                key: float(value) for key, value in manifest.evaluation.items() if is_number(value)
            },
        ),
    )


def _sizes(config: AlbertConfig, manifest: Manifest) -> ModelSizes:
    shapes = needed_shapes(config, manifest.heads).values()
    return ModelSizes(
        num_parameters=sum(map(math.prod, shapes)),
        weights_bytes=manifest.files[WEIGHTS_FILE].size,
        num_layers=len(config.layer_plan),
        hidden_size=config.hidden_size,
        embedding_size=config.embedding_size,
        num_heads=config.num_heads,
        ffn_size=config.ffn_size,
        vocab_size=config.vocab_size,
    )


def _describe(task: str, manifest: Manifest) -> TaskInfo:
    """Return the description of a task, which may have no head."""
    heads = manifest.heads_of(task)
    if not heads:
        vectors = manifest.sentence_vectors
        info = vectors and SentenceVectorsInfo(**asdict(vectors))
        return TaskInfo(name=task, sentence_vectors=info)
    head, entry = next(iter(heads.items()))
    examples = manifest.examples.get(head, [])
    infos = [
        HeadInfo(
            name=head_name(head, entry),
            labels=label_names(entry),
            problem_type=entry.problem_type,
            quality=read_quality(manifest, head),
        )
        for head, entry in heads.items()
    ]
    return TaskInfo(
        name=task,
        labels=label_names(entry) if task == CLASSIFICATION else entry.labels,
        problem_type=entry.problem_type,
        null_score_diff_threshold=entry.null_score_diff_threshold,
        heads=infos if entry.name or len(heads) > 1 else None,
        quality=read_quality(manifest, head),
        examples=[InputExample(**example.model_dump()) for example in examples] or None,
    )


def read_quality(manifest: Manifest, head: str) -> TaskQuality | None:
    """Return a head's quality on held-out data, or else on the export's data, or else None."""
    quality = evaluated_quality(manifest.evaluation, head)
    if quality is not None:
        return quality
    entry = manifest.heads.get(head)
    if entry is None or entry.quality is None:
        return None
    exported = entry.quality
    return TaskQuality(
        metric=exported.metric,
        percent=exported.bundle,
        count=exported.count,
        data=", ".join(exported.data) or None,
    )


def evaluated_quality(evaluation: Mapping[str, Any], head: str) -> TaskQuality | None:
    """Return a head's quality on held-out data, or None if it is unknown."""
    task = task_of(head)
    if task not in _COUNTS:
        return None
    count_name, factor = _COUNTS[task]
    prefix = metric_prefix(head)
    count = evaluation.get(f"{prefix}_{count_name}")
    data = evaluation.get(f"{prefix}_data") or evaluation.get(f"{prefix}_task")
    for key, metric in _METRICS:
        value = evaluation.get(f"{prefix}_{key}")
        if is_number(value) and is_number(count):
            return TaskQuality(
                metric=metric,
                percent=factor * float(value),
                count=int(count),
                data=data if isinstance(data, str) else None,
            )
    return None


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return `license`, `language` and `base_model` of a model card if it is readable."""
    try:
        text = read_small_file(folder / CARD_FILE, _MAX_CARD_BYTES).decode()
        front_matter = _FRONT_MATTER.match(text)
        # BaseLoader reads all scalars as text. Otherwise the language `no` would become False.
        content = yaml.load(front_matter[1], yaml.BaseLoader) if front_matter else {}  # noqa: S506
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    metadata = content if isinstance(content, dict) else {}
    names = {key: _names(metadata.get(key)) for key in ("license", "language", "base_model")}
    return {**names, "license": next(iter(names["license"]), None)}


def _names(value: object) -> list[str]:
    names = value if isinstance(value, list) else [value]
    return [name for name in names if isinstance(name, str) and name]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a manifest's value is a finite number within the range of a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300
