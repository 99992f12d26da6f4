"""What the steps since the last report did, in figures and in words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import numpy as np

from training.loop.distributed import World
from training.loop.flops import mfu
from training.loop.step import Step
from training.objectives.losses import LossName, Tally

_SHORT: Final[dict[str, str]] = {
    "fill-mask": "masked",
    "sentence-order": "order",
    "hidden-states": "hidden",
    "attention-relations": "relations",
}


class Meter:
    """Means since the last report.

    Args:
        flops_a_token: of training; with `peak_flops`, what the hardware could do in a second, it
            tells the part of it that is used.
    """

    def __init__(self, *, flops_a_token: float = 0.0, peak_flops: float = 0.0) -> None:
        self._started = time.monotonic()
        self._flops_a_token, self._peak_flops = flops_a_token, peak_flops
        self._tallies: dict[LossName, Tally] = {}
        self._num_tokens = 0
        self._norms: list[float] = []
        self._factor = 0.0

    def add(self, step: Step) -> None:
        """Take one step in; of one that was left out, the tokens alone."""
        self._num_tokens += step.num_tokens
        self._factor = step.lr_factor
        if not np.isfinite(step.grad_norm):
            return
        self._norms.append(step.grad_norm)
        for task, tally in step.tallies.items():
            self._tallies.setdefault(task, Tally()).merge(tally)

    def figures(self, world: World) -> dict[str, float]:
        """Loss and accuracy of each task that was trained, gradient norm, rate and speed.

        All processes of the world must call it.
        """
        found: dict[str, float] = {}
        for task, tally in self._tallies.items():
            loss, right, count = world.sum(tally.sums)
            if count:
                found |= {f"{task}/loss": loss / count, f"{task}/accuracy": right / count}
        if self._norms:
            found["grad_norm"] = float(np.mean(self._norms))
        speed = self._num_tokens / max(time.monotonic() - self._started, 1e-9)
        found |= {"lr_factor": self._factor, "tokens_per_s": speed}
        if self._peak_flops:
            found["mfu"] = mfu(
                tokens_per_s=speed,
                flops_per_token=self._flops_a_token,
                peak_flops=self._peak_flops * world.size,
            )
        return found


def describe(figures: Mapping[str, float]) -> str:
    """Figures in a few words, for the progress bar."""
    words = [
        f"{_SHORT.get(task, task)} {figures[name]:.3f} {figures[f'{task}/accuracy']:.1%}"
        for name in figures
        for task in [name.removesuffix("/loss")]
        if task != name
    ]
    words.append(f"{figures['tokens_per_s']:,.0f} tokens/s")
    if "mfu" in figures:
        words.append(f"MFU {figures['mfu']:.0%}")
    return ", ".join(words)
