"""GLUE's metrics, computed by scikit-learn and SciPy.

Shape legend: N texts, K labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from albert_serve.bundle.manifest import ProblemType
from training.glue.tasks import Metric

_Numbers: TypeAlias = "NDArray[Any]"


def compute_metrics(
    metrics: Sequence[Metric], logits_NK: _Numbers, targets_N: _Numbers
) -> dict[str, float]:
    """Return the metrics of logits, compared with labels or, if K = 1, with scores.

    If all predictions or all targets are equal, correlations are nan, except that Matthews' is 0.

    Args:
        targets_N: label indices or scores (N,), or 1 and 0 (N, K) if texts can have several labels.
    """
    has_several = targets_N.ndim > 1
    targets = targets_N.astype(np.int64) if has_several else targets_N
    predicted = predictions_of(logits_NK, several=has_several)
    return {metric: _METRICS[metric](targets, predicted) for metric in metrics}


def predictions_of(logits_NK: _Numbers, *, several: bool) -> _Numbers:
    """Return the predictions: label indices (N,), scores (N,), or 1 and 0 (N, K).

    Args:
        several: whether a text can have several labels. Labels are predicted if their probability
            is more than a half.
    """
    if several:
        return (logits_NK > 0).astype(np.int64)
    return logits_NK[:, 0] if logits_NK.shape[1] == 1 else logits_NK.argmax(-1)


# The metrics that select the best checkpoint, as in transformers' run_classification. GLUE's tasks
# have their own metrics.
OFFICIAL: Final[Mapping[ProblemType, tuple[Metric, ...]]] = MappingProxyType(
    {
        "single_label_classification": ("accuracy",),
        "multi_label_classification": ("micro_f1",),
        "regression": ("pearson", "spearman"),
    }
)
# Name of the mean of a task's official metrics, as in transformers' run_glue.
COMBINED: Final = "combined_score"


def mean_metric(metrics: Mapping[str, float]) -> float:
    """Return the mean of a task's official metrics, as in GLUE's score."""
    return sum(metrics.values()) / len(metrics)


def _scikit(name: str, **options: Any) -> Callable[[_Numbers, _Numbers], float]:
    """Return a scikit-learn metric, whose first call imports scikit-learn (this takes a second)."""

    def measure(targets_N: _Numbers, predicted_N: _Numbers) -> float:
        function = getattr(import_module("sklearn.metrics"), name)
        return float(function(targets_N, predicted_N, **options))

    return measure


def _correlation(name: str) -> Callable[[_Numbers, _Numbers], float]:
    def correlate(targets_N: _Numbers, predicted_N: _Numbers) -> float:
        if min(np.ptp(targets_N), np.ptp(predicted_N)) == 0:
            return math.nan
        function = getattr(import_module("scipy.stats"), name)
        return float(function(targets_N, predicted_N).statistic)

    return correlate


_METRICS: Final[Mapping[Metric, Callable[[_Numbers, _Numbers], float]]] = MappingProxyType(
    {
        "accuracy": _scikit("accuracy_score"),
        "f1": _scikit("f1_score", pos_label=1, zero_division=0.0),
        "macro_f1": _scikit("f1_score", average="macro", zero_division=0.0),
        "micro_f1": _scikit("f1_score", average="micro", zero_division=0.0),
        # If texts have several labels, scikit-learn's accuracy is the subset accuracy.
        "subset_accuracy": _scikit("accuracy_score"),
        "matthews_correlation": _scikit("matthews_corrcoef"),
        "pearson": _correlation("pearsonr"),
        "spearman": _correlation("spearmanr"),
        "mse": _scikit("mean_squared_error"),
    }
)
