"""Official metrics of GLUE, by scikit-learn and SciPy.

Shape legend: N texts, K labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

from albert_serve.bundle.manifest import ProblemType
from training.glue.tasks import Metric

_Numbers: TypeAlias = "NDArray[Any]"


def metric_figures(
    metrics: Sequence[Metric], logits_NK: _Numbers, targets_N: _Numbers
) -> dict[str, float]:
    """Return the metrics of logits against labels or, with K = 1, against a regression's scores.

    A correlation with numbers that are all the same is nan; Matthews' is then 0.

    Args:
        targets_N: of texts with several labels (N, K), 1 and 0.
    """
    has_several = targets_N.ndim > 1
    targets = targets_N.astype(np.int64) if has_several else targets_N
    predicted = predictions_of(logits_NK, several=has_several)
    return {metric: _METRICS[metric](targets, predicted) for metric in metrics}


def predictions_of(logits_NK: _Numbers, *, several: bool) -> _Numbers:
    """Return the predictions of logits: labels (N,), a regression's scores, or 1 and 0 (N, K).

    Args:
        several: whether a text can have several labels: those whose probability is over a half.
    """
    if several:
        return (logits_NK > 0).astype(np.int64)
    return logits_NK[:, 0] if logits_NK.shape[1] == 1 else logits_NK.argmax(-1)


# The metrics that decide where no task has its own, as in transformers' run_classification.
OFFICIAL: Final[Mapping[ProblemType, tuple[Metric, ...]]] = MappingProxyType(
    {
        "single_label_classification": ("accuracy",),
        "multi_label_classification": ("micro_f1",),
        "regression": ("pearson", "spearman"),
    }
)
# The figures of which the lowest is the best.
LOWEST: Final = frozenset({"loss", "mse"})
# The mean of several official metrics of a task, as in transformers' run_glue.
COMBINED: Final = "combined_score"


def mean_metric(figures: Mapping[str, float]) -> float:
    """Return the mean of a task's official metrics, as GLUE's score takes it."""
    return sum(figures.values()) / len(figures)


def _f1(targets_N: _Numbers, predicted_N: _Numbers) -> float:
    return float(f1_score(targets_N, predicted_N, pos_label=1, zero_division=0.0))


def _macro_f1(targets_N: _Numbers, predicted_N: _Numbers) -> float:
    """Return the mean over the labels that occur in the targets."""
    labels = np.flatnonzero(targets_N.any(0)) if targets_N.ndim > 1 else np.unique(targets_N)
    if not len(labels):
        return 0.0
    return float(
        f1_score(targets_N, predicted_N, labels=labels, average="macro", zero_division=0.0)
    )


def _correlation(function: Callable[..., Any]) -> Callable[[_Numbers, _Numbers], float]:
    def correlate(targets_N: _Numbers, predicted_N: _Numbers) -> float:
        if min(np.ptp(targets_N), np.ptp(predicted_N)) == 0:
            return math.nan
        return float(function(targets_N, predicted_N).statistic)

    return correlate


_METRICS: Final[Mapping[Metric, Callable[[_Numbers, _Numbers], float]]] = MappingProxyType(
    {
        "accuracy": lambda targets, predicted: float(accuracy_score(targets, predicted)),
        "f1": _f1,
        "macro_f1": _macro_f1,
        "micro_f1": lambda targets, predicted: float(
            f1_score(targets, predicted, average="micro", zero_division=0.0)
        ),
        # Which scikit-learn's accuracy is of several labels.
        "subset_accuracy": lambda targets, predicted: float(accuracy_score(targets, predicted)),
        "matthews_correlation": lambda targets, predicted: float(
            matthews_corrcoef(targets, predicted)
        ),
        "pearson": _correlation(stats.pearsonr),
        "spearman": _correlation(stats.spearmanr),
        "mse": lambda targets, predicted: float(mean_squared_error(targets, predicted)),
    }
)
