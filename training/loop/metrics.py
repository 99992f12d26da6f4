"""Metrics of a run, written as lines of JSON and for TensorBoard."""

from __future__ import annotations

import json
import math
from numbers import Integral
from pathlib import Path
from typing import Any

from albert_serve.files import write_atomically


class MetricsWriter:
    """The figures of a run: `metrics.jsonl` and TensorBoard's `tensorboard/`.

    A line is one JSON object; `write` passes it to the system before it returns, so that a killed
    process loses none. Lines of steps after `step`, which the run repeats when it is resumed, and
    a truncated line are removed, and TensorBoard hides its events of those steps. At step 0 the
    run starts anew, and nothing is kept.

    Args:
        folder: the run's folder; it is created if it is missing.
        step: number of steps done.

    Raises:
        OSError: a file cannot be read or written, here or in a method.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._figures = _Lines(folder / "metrics.jsonl", step=step)
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
            self._figures.append({"step": step, **rounded})
            for name, value in rounded.items():
                if value is not None:
                    self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        except OSError as error:  # whose stream does not name its file
            raise OSError(error.errno, error.strerror, str(self._folder)) from error

    def close(self) -> None:
        """Close TensorBoard's file."""
        self._tensorboard.close()


class _Lines:
    """A JSON Lines file whose objects have a step."""

    def __init__(self, file: Path, *, step: int) -> None:
        self._file = file
        if not file.is_file():
            return
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if step and _step_of(line) <= step]
        write_atomically(file, "".join(f"{line}\n" for line in kept).encode())

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False) + "\n"
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(line)


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
