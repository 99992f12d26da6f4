"""What every training run has: a folder with metrics and a state that it can go on from."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, TypeAlias

import torch

from training.checkpoint import put_in_place, write_atomically
from training.errors import TrainingError

_STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_Handlers: TypeAlias = "dict[signal.Signals, Any]"


class RunError(TrainingError):
    """A run that cannot start or go on as asked."""


@dataclass(kw_only=True)
class Progress:
    """How far a run is, by steps or by wall clock, whichever ends it first.

    Attributes:
        num_steps: steps of the whole run; None where only the budget ends it.
        budget_s: seconds of training of the whole run, interruptions not counted.
        step: steps done.
        elapsed_s: seconds of training before the clock was started.

    Raises:
        RunError: the run would have no end.
    """

    num_steps: int | None
    budget_s: float | None
    step: int = 0
    elapsed_s: float = 0.0
    _started: float | None = None

    def __post_init__(self) -> None:
        if self.num_steps is None and self.budget_s is None:
            raise RunError("a run needs an end: give --steps or --budget")

    def start_clock(self) -> None:
        """Count seconds of training from now on."""
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, over all parts of the run."""
        running = 0.0 if self._started is None else time.monotonic() - self._started
        return self.elapsed_s + running

    @property
    def done(self) -> float:
        """The part of the run that is done, from 0 to 1."""
        by_steps = self.step / self.num_steps if self.num_steps else 0.0
        by_time = self.seconds / self.budget_s if self.budget_s else 0.0
        return min(1.0, max(by_steps, by_time))


class StopFlag:
    """Inside `with`, SIGTERM, SIGINT and SIGUSR1 only set `signal`; a second one ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: _Handlers = {}

    def __enter__(self) -> StopFlag:
        self._before = {number: signal.signal(number, self._handle) for number in _STOPPING}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise SystemExit(128 + number)
        self.signal = number


class MetricsFile:
    """One JSON object a line, flushed at once.

    Lines of steps after `step`, and a line cut short, were written by a part of the run that was
    lost; they are taken out.
    """

    def __init__(self, file: Path, *, step: int) -> None:
        kept = [line for line in _lines(file) if _step_of(line) <= step]
        write_atomically(file, "".join(kept).encode())
        self._file = file

    def write(self, **metrics: float) -> None:
        """Append one line; numbers are rounded to six significant digits."""
        rounded = {name: float(f"{value:.6g}") for name, value in metrics.items()}
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(rounded) + "\n")


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return float("inf")


def is_known_run(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the folder holds this run.

    Settings that its `run.json` does not name are not compared.

    Raises:
        RunError: the folder holds a run with other settings.
    """
    file = folder / "run.json"
    if not file.is_file():
        return False
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{file} is not JSON: {error}; give another --output") from error
    changed = list(_differences(known, settings))
    if changed:
        raise RunError(
            f"{folder} holds a run with {'; '.join(changed)}. "
            "Give the same options to go on with it, or another --output"
        )
    return True


def _differences(known: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """What differs, down to the single setting."""
    found: list[str] = []
    for name, value in settings.items():
        before = known.get(name, value)
        if isinstance(before, dict) and isinstance(value, dict):
            found += _differences(before, value)
        elif before != value:
            found.append(f"{name} {before!r}, not {value!r}")
    return found


def record_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make the run's folder, with the `run.json` that `is_known_run` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "run.json", json.dumps(dict(settings), indent=2).encode())


def save_state(file: Path, state: Mapping[str, Any]) -> None:
    """Write a run's state whole or not at all."""
    partial = file.with_name(file.name + ".partial")
    torch.save(dict(state), partial)
    put_in_place(partial, file)


def load_state(file: Path) -> dict[str, Any] | None:
    """The state that `save_state` wrote; None where there is none.

    Raises:
        RunError: the file is damaged.
    """
    if not file.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises several unrelated types
        raise RunError(f"{file} cannot be read: {error}") from error
    return state
