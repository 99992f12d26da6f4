"""How well a bundle answers each of its tasks, as far as its manifest says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeGuard

from albert_serve.bundle.manifest import AGREEMENT, Manifest
from albert_serve.bundle.weights import TaskName

# Names in `Manifest.evaluation`, which `training.evaluate` gives: the metric, the figure, the
# count, and what makes a percentage of the figure.
_EVALUATED: Final[dict[str, tuple[str, str, str, float]]] = {
    "fill-mask": ("accuracy", "masked_accuracy", "masked_tokens", 100.0),
    "sentence-order": ("accuracy", "sentence_order_accuracy", "sentence_order_pairs", 100.0),
    "text-classification": (
        "accuracy",
        "text_classification_accuracy",
        "text_classification_texts",
        100.0,
    ),
    "multiple-choice": (
        "accuracy",
        "multiple_choice_accuracy",
        "multiple_choice_questions",
        100.0,
    ),
    "question-answering": ("F1", "question_answering_f1", "question_answering_questions", 1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFigure:
    """A task's metric on labelled data.

    Attributes:
        metric: "accuracy" or "F1".
        percent: its value, 0 to 100.
        count: the number of answers.
    """

    metric: str
    percent: float
    count: int


def read_figure(manifest: Manifest, task: TaskName) -> TaskFigure | None:
    """Return a task's figure, of held-out data if there is one, else of export; None without.

    How often a bundle agrees with torch says nothing of its answers, and is passed over.
    """
    if task in _EVALUATED:
        metric, name, count_name, factor = _EVALUATED[task]
        value, count = (manifest.evaluation.get(key) for key in (name, count_name))
        if _is_number(value) and _is_number(count):
            return TaskFigure(metric=metric, percent=factor * float(value), count=int(count))
    measured = manifest.quality.get(task)
    if measured is None or measured.metric == AGREEMENT:
        return None
    return TaskFigure(metric=measured.metric, percent=measured.bundle, count=measured.count)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
