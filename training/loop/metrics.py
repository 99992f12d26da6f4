"""Metrics of a run: means since the last report, and their files of JSON and for TensorBoard."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Final

import numpy as np

from albert_serve.files import write_atomically
from training.data.batch import LossName
from training.loop.distributed import World
from training.loop.step import StepResult
from training.losses import Tally

_SHORT: Final[dict[str, str]] = {
    "fill-mask": "masked",
    "sentence-order": "order",
    "paired-order": "pairs",
}


class MetricsWriter:
    """The figures of a run: `metrics.jsonl` and TensorBoard's `tensorboard/`.

    A line is one JSON object; `write` passes it to the system before it returns, so that a killed
    process loses none. Lines of steps after `step`, which the run repeats when it is resumed, and
    a truncated line are removed, and TensorBoard hides its events of those steps. At step 0 the
    run starts anew, and nothing is kept.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = folder / "metrics.jsonl"
        if self._file.is_file():
            lines = self._file.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if step and _step_of(line) <= step]
            write_atomically(self._file, "".join(f"{line}\n" for line in kept).encode())
        # TensorBoard hides events of earlier files from `purge_step` on.
        self._tensorboard = SummaryWriter(
            str(folder / "tensorboard"), purge_step=step + 1 if step else 0
        )

    def write(self, /, *, step: int, **figures: float) -> None:
        """Record the figures of one step.

        Integers stay integers, other numbers are rounded to six significant digits. A figure that
        is not finite, which JSON cannot represent, is null and does not go to TensorBoard.
        """
        rounded = {name: _rounded(value) for name, value in figures.items()}
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": step, **rounded}, allow_nan=False) + "\n")
            for name, value in rounded.items():
                if value is not None:
                    self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        except OSError as error:  # whose stream does not name its file
            raise OSError(error.errno, error.strerror, str(self._folder)) from error

    def close(self) -> None:
        """Close TensorBoard's file."""
        self._tensorboard.close()


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for a line without a step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _rounded(value: float) -> float | None:
    if isinstance(value, Integral):
        return int(value)
    return float(f"{value:.6g}") if math.isfinite(value) else None


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
