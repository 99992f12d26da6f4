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
