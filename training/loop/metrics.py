"""Metrics of a run, written as lines of JSON and for TensorBoard."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from albert_serve.files import write_atomically
from training.model.similarity import LayerSimilarity

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_LOG: Final = logging.getLogger(__name__)


class Metrics:
    """The figures of a run: `metrics.jsonl`, `layers.jsonl` and TensorBoard's `tensorboard/`.

    A line is one JSON object; `write` passes it to the system before it returns, so that a killed
    process loses none. Lines of steps after `step`, which the run repeats when it is resumed, and
    a truncated line are removed, and TensorBoard hides its events of those steps. At step 0 the
    run starts anew, and nothing is kept.

    Without the package `tensorboard` only the lines are written, and a warning is logged.

    Args:
        folder: the run's folder; it is created if it is missing.
        step: number of steps done.

    Raises:
        OSError: a file cannot be read or written, here or in a method; it names the file.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._figures = _Lines(folder / "metrics.jsonl", step=step)
        self._layers = _Lines(folder / "layers.jsonl", step=step)
        self._events = folder / "tensorboard"
        with _naming(self._events):
            self._tensorboard = _open_tensorboard(self._events, step=step)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, /, *, step: int, **figures: float) -> None:
        """Record the figures of one step.

        Integers stay integers, other numbers are rounded to six significant digits. A figure that
        is not finite, which JSON cannot represent, is null and does not go to TensorBoard.
        """
        rounded = {name: _rounded(value) for name, value in figures.items()}
        self._figures.append({"step": step, **rounded})
        if self._tensorboard is None:
            return
        with _naming(self._events):
            for name, value in rounded.items():
                if value is not None:
                    self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def write_layers(self, *, step: int, layers: LayerSimilarity) -> None:
        """Record how far each layer moved its embeddings, as a line of `layers.jsonl`."""
        self._layers.append(
            {
                "step": step,
                "distance": [_rounded(value) for value in layers.distance],
                "angle_degrees": [_rounded(value) for value in layers.angle_degrees],
            }
        )

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self._tensorboard is not None:
            with _naming(self._events):
                self._tensorboard.close()


class _Lines:
    """A JSON Lines file whose objects have a step."""

    def __init__(self, file: Path, *, step: int) -> None:
        self._file = file
        if not file.is_file():
            return
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if step and _step_of(line) <= step]
        with _naming(file):
            write_atomically(file, "".join(f"{line}\n" for line in kept).encode())

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False) + "\n"
        with _naming(self._file), self._file.open("a", encoding="utf-8") as stream:
            stream.write(line)


def _step_of(line: str) -> float:
    """Return the step of a line; infinity if the line has none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _rounded(value: float) -> float | None:
    if isinstance(value, Integral):
        return int(value)
    return float(f"{value:.6g}") if math.isfinite(value) else None


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Add the file's name to an OSError without one, such as that of a full disk; for `with`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(file)) from error


def _open_tensorboard(folder: Path, *, step: int) -> SummaryWriter | None:
    """Return a writer whose events replace those after `step`; None without the package."""
    try:
        # Imported here because it is slow and optional.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        _LOG.warning("metrics.jsonl alone is written, nothing for TensorBoard: %s", error)
        return None
    # TensorBoard hides events of earlier files from `purge_step` on.
    return SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
