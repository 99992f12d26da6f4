"""Mean loss, accuracy and speed of the steps since the last report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import numpy as np

from training.data.batch import LossName
from training.loop.distributed import World
from training.loop.step import StepResult
from training.losses import Tally

_SHORT: Final[dict[str, str]] = {
    "fill-mask": "masked",
    "sentence-order": "order",
    "paired-order": "pairs",
}


class Meter:
    """Means since the last report."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._tallies: dict[LossName, Tally] = {}
        self._num_tokens = 0
        self._norms: list[float] = []
        self._factor = 0.0

    def add(self, step: StepResult) -> None:
        """Add one step; of a skipped step, only the tokens count."""
        self._num_tokens += step.num_tokens
        self._factor = step.lr_factor
        if not np.isfinite(step.grad_norm):
            return
        self._norms.append(step.grad_norm)
        for task, tally in step.tallies.items():
            self._tallies.setdefault(task, Tally()).merge(tally)

    def figures(self, world: World) -> dict[str, float]:
        """Return each trained task's loss and accuracy, gradient norm, learning rate and speed.

        All processes must call it.
        """
        figures: dict[str, float] = {}
        for task, tally in self._tallies.items():
            loss, right, count = world.sum(tally.sums)
            if count:
                figures |= {f"{task}/loss": loss / count, f"{task}/accuracy": right / count}
        if self._norms:
            figures["grad_norm"] = float(np.mean(self._norms))
        speed = self._num_tokens / max(time.monotonic() - self._started, 1e-9)
        figures |= {"lr_factor": self._factor, "tokens_per_s": speed}
        return figures


def describe(figures: Mapping[str, float]) -> str:
    """Format figures for the progress bar."""
    words = [
        f"{_SHORT.get(task, task)} {figures[name]:.3f} {figures[f'{task}/accuracy']:.1%}"
        for name in figures
        for task in [name.removesuffix("/loss")]
        if task != name
    ]
    words.append(f"{figures['tokens_per_s']:,.0f} tokens/s")
    return ", ".join(words)


def describe_validation(figures: Mapping[str, float]) -> str:
    """Format the figures of a task's validation."""
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
