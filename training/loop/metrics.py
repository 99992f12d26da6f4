"""What a run records while it trains: lines of JSON, and the same for TensorBoard."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from training.model.checkpoint import write_atomically
from training.model.similarity import LayerSimilarity

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_LOG: Final = logging.getLogger(__name__)


class Metrics:
    """The figures of a run: `metrics.jsonl`, `layers.jsonl` and TensorBoard's `tensorboard/`.

    A line is one JSON object and is with the system when `write` returns, so that a process that
    is killed loses none. Lines of steps after `step`, and a line cut short, were written by a part
    of the run that was lost; they are taken out, and TensorBoard hides its events of those steps.
    At step 0 the run begins anew, and nothing is kept.

    Without the package `tensorboard` the lines alone are written, and the log says so.

    Args:
        folder: the run's folder; it is made if need be.
        step: steps of the run that are done.

    Raises:
        OSError: a file cannot be read or written, from here or from a method; it names the file.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, /, *, step: int, **figures: float) -> None:
        """Record the figures of one step.

        Whole numbers stay whole, others are rounded to six significant digits. A figure that is
        not finite, which JSON cannot say, is null, and is not given to TensorBoard.
        """
        known = {name: _rounded(value) for name, value in figures.items()}
        self._figures.append({"step": step, **known})
        if self._tensorboard is None:
            return
        with _naming(self._events):
            for name, value in known.items():
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
        """Let go of TensorBoard's file."""
        if self._tensorboard is not None:
            with _naming(self._events):
                self._tensorboard.close()


class _Lines:
    """A file of JSON objects, one a line, each with its step."""

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
    """The step that a line is of; beyond all steps where it does not say."""
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
    """Errors of the system that name no file, as that of a full disk does not, name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(file)) from error


def _open_tensorboard(folder: Path, *, step: int) -> SummaryWriter | None:
    """A writer whose events take the place of those after `step`; None without the package."""
    try:
        # Slow, and not installed everywhere.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        _LOG.warning("metrics.jsonl alone is written, nothing for TensorBoard: %s", error)
        return None
    # TensorBoard hides what an earlier file has from the purged step on.
    return SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
