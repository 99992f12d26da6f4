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
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from training.glue.tasks import Metric

_Numbers: TypeAlias = "NDArray[Any]"


def metric_figures(
    metrics: Sequence[Metric], logits_NK: _Numbers, targets_N: _Numbers
) -> dict[str, float]:
    """Return the metrics of logits against labels or, with K = 1, against a regression's scores.

    A correlation with numbers that are all the same is nan; Matthews' is then 0.
    """
    predicted = logits_NK[:, 0] if logits_NK.shape[1] == 1 else logits_NK.argmax(-1)
    return {metric: _METRICS[metric](targets_N, predicted) for metric in metrics}


# The mean of several official metrics of a task, as in transformers' run_glue.
COMBINED: Final = "combined_score"


def mean_metric(figures: Mapping[str, float]) -> float:
    """Return the mean of a task's official metrics, as GLUE's score takes it."""
    return sum(figures.values()) / len(figures)


def _f1(targets_N: _Numbers, predicted_N: _Numbers) -> float:
    return float(f1_score(targets_N, predicted_N, pos_label=1, zero_division=0.0))


def _macro_f1(targets_N: _Numbers, predicted_N: _Numbers) -> float:
    """Return the mean over the labels that occur in the targets."""
    labels = np.unique(targets_N)
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
        "matthews_correlation": lambda targets, predicted: float(
            matthews_corrcoef(targets, predicted)
        ),
        "pearson": _correlation(stats.pearsonr),
        "spearman": _correlation(stats.spearmanr),
    }
)
