"""Calibration of a classifier by one temperature, which divides its logits (Guo et al. 2017).

Shape legend: N texts, K labels.
"""

from __future__ import annotations

from math import exp, nan
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

_NUM_BINS: Final = 15
_MAX_LOG: Final = 4.0


def fit_temperature(logits_NK: Tensor, targets_N: Tensor) -> float:
    """Return the temperature of the least cross-entropy of texts.

    The targets are smoothed by 1 / (N + 2), as Platt's are. Otherwise, the temperature would be 0
    if all predictions are right.

    Args:
        targets_N: for several labels per text (N, K), 1 and 0.
    """
    from scipy.optimize import minimize_scalar  # its import takes a second

    logits_NK, smoothing = logits_NK.double(), 1 / (len(logits_NK) + 2)

    def loss(log: float) -> float:
        scaled_NK = logits_NK / exp(log)
        if targets_N.ndim == 1:
            return F.cross_entropy(scaled_NK, targets_N, label_smoothing=smoothing).item()
        smooth_NK = targets_N * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(scaled_NK, smooth_NK.double()).item()

    return exp(minimize_scalar(loss, bounds=(-_MAX_LOG, _MAX_LOG), method="bounded").x)


def calibration_error(logits_NK: Tensor, targets_N: Tensor) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy.

    Args:
        logits_NK: logits divided by the temperature.
        targets_N: as in `fit_temperature`. Each of several labels counts as a prediction.
    """
    if targets_N.ndim == 1:
        confidence_N, labels_N = logits_NK.double().softmax(-1).max(-1)
        right_N = labels_N == targets_N
    else:
        confidence_N, right_N = logits_NK.double().sigmoid().ravel(), targets_N.ravel()
    bins_N = (confidence_N * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    sums = torch.bincount(bins_N, confidence_N - right_N.double())
    return sums.abs().sum().item() / len(bins_N)


def calibration_figures(logits_NK: Tensor, targets_N: Tensor) -> dict[str, float]:
    """Return the fitted temperature, and the calibration error with and without it."""
    if not logits_NK.isfinite().all():  # the run has diverged
        return {"temperature": 1.0, "calibration_error": nan, "raw_calibration_error": nan}
    temperature = fit_temperature(logits_NK, targets_N)
    return {
        "temperature": temperature,
        "calibration_error": calibration_error(logits_NK / temperature, targets_N),
        "raw_calibration_error": calibration_error(logits_NK, targets_N),
    }
