"""Logits to probabilities, safe for logits of any size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from albert_serve.errors import EngineError
from albert_serve.tasks.base import Logits


def softmax(logits: Logits) -> NDArray[np.float64]:
    """Probabilities over the last axis; same shape.

    Raises:
        EngineError: a logit is not finite.
    """
    wide = finite(logits)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Logarithms of `softmax`, finite however small a probability is; same shape.

    Raises:
        EngineError: a logit is not finite.
    """
    wide = finite(logits)
    wide = wide - wide.max(axis=-1, keepdims=True)
    logs: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return logs


def sigmoid(logits: Logits) -> NDArray[np.float64]:
    """Each logit's own probability; same shape.

    Raises:
        EngineError: a logit is not finite.
    """
    shares: NDArray[np.float64] = 0.5 * (1.0 + np.tanh(0.5 * finite(logits)))
    return shares


def finite(logits: Logits) -> NDArray[np.float64]:
    """The logits in double precision.

    Raises:
        EngineError: one is not finite.
    """
    if not np.isfinite(logits).all():
        raise EngineError("the model gave logits that are not finite; its weights may be damaged")
    return logits.astype(np.float64)


def best(scores: NDArray[np.float64], candidates: NDArray[np.int64], top_k: int) -> list[int]:
    """The `top_k` candidates of the largest scores, largest first; of equals the smaller id first.

    Args:
        scores: (V,), by id.
        candidates: the ids to choose from, each once.
    """
    found = scores[candidates]
    if top_k < len(candidates):
        within = np.argpartition(-found, top_k - 1)[:top_k]
        candidates, found = candidates[within], found[within]
    order = np.lexsort((candidates, -found))
    return [int(candidate) for candidate in candidates[order]]
