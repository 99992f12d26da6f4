"""The maximum length of texts in files: one rule for finetune, evaluate and score."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.weights import CLASSIFICATION, task_of

TRUNCATION_HELP: Final = (
    "truncate longer texts to the length of training (--length of finetune; otherwise all "
    "positions of the model); with --no-truncation they are errors (default: truncate)"
)
# These tasks read a text as one input. Other tasks read windows, or rows of pretraining data.
_TASKS: Final = (CLASSIFICATION, "multiple-choice", FEATURE_EXTRACTION)


def text_length(head: str, training: object, max_positions: int) -> int:
    """Return the maximum number of tokens in a text: the length in training, if it is known.

    Args:
        head: name of the head: a task, or `text-classification/NAME`.
        training: content of a checkpoint's `training.json`, or its copy in a manifest.
        max_positions: number of the model's positions, which limits all texts.
    """
    if task_of(head) not in _TASKS:
        return max_positions
    stages = training.get("stages") if isinstance(training, dict) else None
    stages = stages if isinstance(stages, list) else []
    lengths = [_length(stage) for stage in stages if _has_trained(stage, head)]
    return min([max_positions, *lengths[-1:]])


def describe_long_texts(num_long: int, num_texts: int, length: int, *, truncation: bool) -> str:
    """Return the line that a job prints at its end if it truncated or omitted long texts."""
    if truncation:
        return (
            f"{num_long:,} of {num_texts:,} texts were truncated to {length} tokens "
            "(--no-truncation makes them errors)"
        )
    return (
        f"{num_long:,} of {num_texts:,} texts were omitted, because they have more than {length} "
        "tokens (--truncation truncates them)"
    )


def _has_trained(stage: Any, head: str) -> bool:
    """Return whether a training stage trained a head or, for feature extraction, embeddings."""
    if not isinstance(stage, dict) or _length(stage) < 1:
        return False
    if head == FEATURE_EXTRACTION:
        return stage["settings"].get("embeddings") not in (None, "None", [])
    tasks = stage.get("tasks")
    return isinstance(tasks, list) and head in tasks


def _length(stage: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens in a stage's texts, or 0 if it is unknown."""
    settings = stage.get("settings")
    length = str(settings.get("length")) if isinstance(settings, dict) else ""
    return int(length) if re.fullmatch(r"[0-9]{1,9}", length) else 0
