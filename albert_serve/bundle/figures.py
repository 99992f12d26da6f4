"""Figures of a bundle's answers to each of its tasks, as far as its manifest has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeGuard

from albert_serve.bundle.manifest import AGREEMENT, Manifest

# Names in `Manifest.evaluation`, which `training.evaluate` gives: the beginning of a task's
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
class TaskFigure:
    """A task's metric on labelled data.

    Attributes:
        metric: such as "accuracy" or "F1".
        percent: its value, at most 100; a correlation may be negative.
        count: the number of answers.
    """

    metric: str
    percent: float
    count: int


def read_figure(manifest: Manifest, head: str) -> TaskFigure | None:
    """Return a head's figure, of held-out data if there is one, else of export; None without.

    How often a bundle agrees with torch says nothing of its answers, and is passed over.
    """
    task, _, name = head.partition("/")
    if task in _EVALUATED:
        prefix, counted, factor = _EVALUATED[task]
        prefix = f"{prefix}/{name}" if name else prefix
        count = manifest.evaluation.get(f"{prefix}_{counted}")
        for figure, metric in _METRICS:
            value = manifest.evaluation.get(f"{prefix}_{figure}")
            if is_number(value) and is_number(count):
                return TaskFigure(metric=metric, percent=factor * float(value), count=int(count))
    measured = manifest.head_quality.get(head)
    if measured is None or measured.metric == AGREEMENT:
        return None
    return TaskFigure(metric=measured.metric, percent=measured.bundle, count=measured.count)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a manifest is a finite number, of a size that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300
