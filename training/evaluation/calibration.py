"""Calibration: whether predictions of a confidence are right as often as it says.

Guo et al. 2017, "On Calibration of Modern Neural Networks", section 2. Shape legend: P predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_BINS: Final = 15


class Bin(NamedTuple):
    """The predictions whose confidence is in an interval: means, and how many they are."""

    confidence: float
    accuracy: float
    num_predictions: int


def reliability(confidences_P: NDArray[Any], is_right_P: NDArray[Any]) -> list[Bin]:
    """Return the bins of equal width that have predictions, from low to high confidence.

    Args:
        confidences_P: from 0 to 1.
        is_right_P: whether each prediction is right.
    """
    edges = np.linspace(0, 1, NUM_BINS + 1)
    bin_of_P = np.clip(np.digitize(confidences_P, edges[1:-1], right=True), 0, NUM_BINS - 1)
    return [
        Bin(
            confidence=float(confidences_P[within].mean()),
            accuracy=float(is_right_P[within].mean()),
            num_predictions=int(within.sum()),
        )
        for number in range(NUM_BINS)
        if (within := bin_of_P == number).any()
    ]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Return the mean distance of confidence and accuracy over all predictions, from 0 to 1."""
    total = sum(each.num_predictions for each in bins)
    return sum(abs(each.confidence - each.accuracy) * each.num_predictions for each in bins) / total
