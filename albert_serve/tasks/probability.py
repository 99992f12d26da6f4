"""Logits to probabilities, without overflow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from albert_serve.errors import EngineError
from albert_serve.tasks.base import Logits


def softmax(logits: Logits) -> NDArray[np.float64]:
    """Return probabilities over the last axis; same shape."""
    wide = finite(logits)
    exponentials = np.exp(wide - wide.max(axis=-1, keepdims=True))
    probabilities: NDArray[np.float64] = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Return the logarithms of `softmax`, finite for any probability; same shape."""
    wide = finite(logits)
    wide = wide - wide.max(axis=-1, keepdims=True)
    logs: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return logs


def sigmoid(logits: Logits) -> NDArray[np.float64]:
    """Return each logit's own probability; same shape."""
    probabilities: NDArray[np.float64] = 0.5 * (1.0 + np.tanh(0.5 * finite(logits)))
    return probabilities


def finite(logits: Logits) -> NDArray[np.float64]:
    """Return the logits in double precision."""
    if not np.isfinite(logits).all():
        raise EngineError("the model gave logits that are not finite; its weights may be damaged")
    return logits.astype(np.float64)


def best(scores: NDArray[np.float64], candidates: NDArray[np.int64], top_k: int) -> list[int]:
    """Return the `top_k` candidates of the largest scores, largest first; ties by smaller id.

    Args:
        scores: (V,), by id.
        candidates: the ids to choose from, each once.
    """
    values = scores[candidates]
    if top_k < len(candidates):
        within = np.argpartition(-values, top_k - 1)[:top_k]
        candidates, values = candidates[within], values[within]
    order = np.lexsort((candidates, -values))
    return [int(candidate) for candidate in candidates[order]]
