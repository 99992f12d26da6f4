"""Inputs of several lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from albert_serve.tasks.base import EncoderInput


def some_inputs(tasks: Sequence[str], seed: int = 0) -> list[EncoderInput]:
    generator = np.random.default_rng(seed)
    return [
        EncoderInput(
            ids=generator.integers(5, 1000, n).tolist(), types=[0] * n, task=task, rows=[0]
        )
        for n, task in zip((3, 40, 17, 90, 1, 64), list(tasks) * 3, strict=False)
    ]
