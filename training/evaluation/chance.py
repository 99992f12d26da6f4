"""The figures of constant answers, over which a trained model must be.

Shape legend: N texts, K labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from albert_serve.bundle.manifest import ProblemType
from training.evaluation.metrics import LOWEST


def chance_level(
    figure: str,
    targets: NDArray[Any],
    num_labels: int,
    problem: ProblemType,
    measure: Callable[[Tensor, Tensor], Mapping[str, float]],
) -> float:
    """Return the best figure that one answer for all texts has; 0 for a correlation.

    A run that gets no further has failed (Mosbach et al. 2021, "On the Stability of Fine-tuning
    BERT", section 3).

    Args:
        figure: `loss`, or one of `measure`.
        targets: labels or scores (N,), or 1 and 0 for each of several labels (N, K).
        measure: the metrics of logits (N, K) and the targets.
    """
    if figure == "loss":
        return _least_loss(targets, num_labels, problem)
    values = [
        measure(from_numpy(logits_NK), from_numpy(targets))[figure]
        for logits_NK in _constants(targets, num_labels, problem)
    ]
    known = [value for value in values if not math.isnan(value)]
    return (min if figure in LOWEST else max)(known, default=0.0)


def _least_loss(targets: NDArray[Any], num_labels: int, problem: ProblemType) -> float:
    """Return the loss of the frequencies of the labels, or of the mean score."""
    if problem == "regression":
        return float(targets.var())
    if problem == "multi_label_classification":
        parts_K = targets.mean(0)
        return float((_entropies(parts_K) + _entropies(1 - parts_K)).mean())
    parts_K = np.bincount(targets, minlength=num_labels) / len(targets)
    return float(_entropies(parts_K).sum())


def _entropies(parts: NDArray[Any]) -> NDArray[Any]:
    entropies: NDArray[Any] = -parts * np.log(np.where(parts > 0, parts, 1))
    return entropies


def _constants(
    targets: NDArray[Any], num_labels: int, problem: ProblemType
) -> Iterator[NDArray[np.float32]]:
    """Yield logits (N, K) that are the same for all texts."""
    rows: list[Any]
    if problem == "regression":
        rows = [[targets.mean()]]
    elif problem == "multi_label_classification":
        # The most frequent labels, from none to all.
        order = np.argsort(-targets.mean(0), kind="stable")
        numbers = np.arange(num_labels)
        rows = [np.where(np.isin(numbers, order[:k]), 1.0, -1.0) for k in range(num_labels + 1)]
    else:
        rows = list(np.eye(num_labels))
    for row_K in rows:
        yield np.tile(np.asarray(row_K, np.float32), (len(targets), 1))
