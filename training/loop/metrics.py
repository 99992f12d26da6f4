"""Metrics of a run: means since the last report, `metrics.jsonl` and TensorBoard."""

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

_SHORT_NAMES: Final[dict[str, str]] = {
    "fill-mask": "masked",
    "sentence-order": "order",
    "paired-order": "pairs",
}


class MetricsWriter:
    """Writer of a run's `metrics.jsonl` and of TensorBoard's `tensorboard/`.

    Each line is a JSON object. `write` passes it to the system before it returns, so a killed
    process loses no line. A resumed run repeats the steps after `step`: their lines and a truncated
    line are removed, and TensorBoard hides their events. If `step` is 0, all lines are removed.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # importing TensorBoard is slow

        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = folder / "metrics.jsonl"
        if self._file.is_file():
            lines = self._file.read_text(encoding="utf-8", errors="replace").splitlines()
            lines = [line for line in lines if step and _step_of(line) <= step]
            write_atomically(self._file, "".join(f"{line}\n" for line in lines).encode())
        # TensorBoard hides the events of earlier files from `purge_step` on.
        self._tensorboard = SummaryWriter(
            str(folder / "tensorboard"), purge_step=step + 1 if step else 0
        )

    def write(self, /, *, step: int, **metrics: float) -> None:
        """Record the metrics of one step.

        Integers are written unchanged, other numbers with six significant digits. JSON cannot
        represent values that are not finite: they are null, and are not written to TensorBoard.
        """
        rounded = {name: _round(value) for name, value in metrics.items()}
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": step, **rounded}, allow_nan=False) + "\n")
            for name, value in rounded.items():
                if value is not None:
                    self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        except OSError as error:  # the stream's error does not name the file
            raise OSError(error.errno, error.strerror, str(self._folder)) from error

    def close(self) -> None:
        """Close TensorBoard's file."""
        self._tensorboard.close()


def _step_of(line: str) -> float:
    """Return the step of a line, or infinity if it does not have one."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _round(value: float) -> float | None:
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
        """Add one step. Of a skipped step, only the tokens count."""
        self._num_tokens += step.num_tokens
        self._factor = step.lr_factor
        if not np.isfinite(step.grad_norm):
            return
        self._norms.append(step.grad_norm)
        for task, tally in step.tallies.items():
            self._tallies.setdefault(task, Tally()).merge(tally)

    def metrics(self, world: World) -> dict[str, float]:
        """Return losses and accuracies by task, gradient norm, learning-rate factor and throughput.

        All processes must call this method.
        """
        metrics: dict[str, float] = {}
        for task, tally in self._tallies.items():
            loss, num_correct, count = world.sum(tally.sums)
            if count:
                metrics |= {f"{task}/loss": loss / count, f"{task}/accuracy": num_correct / count}
        if self._norms:
            metrics["grad_norm"] = float(np.mean(self._norms))
        tokens_per_s = self._num_tokens / max(time.monotonic() - self._started, 1e-9)
        metrics |= {"lr_factor": self._factor, "tokens_per_s": tokens_per_s}
        return metrics


def describe(metrics: Mapping[str, float]) -> str:
    """Format metrics for the progress bar."""
    descriptions = [
        f"{_SHORT_NAMES.get(task, task)} {metrics[name]:.3f} {metrics[f'{task}/accuracy']:.1%}"
        for name in metrics
        for task in [name.removesuffix("/loss")]
        if task != name
    ]
    descriptions.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    return ", ".join(descriptions)
