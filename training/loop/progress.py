"""Progress of a run, its settings in `run.json`, and the precision that it keeps."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from albert_serve.files import write_atomically
from training.errors import RunError
from training.loop.distributed import World
from training.system.precision import DTYPES, PrecisionName, cpu_has_bf16, product_dtype

# Settings of a run's end, which may be changed when it is resumed.
_ENDS: Final = frozenset(
    {"steps", "num_steps", "epochs", "budget", "budget_s", "patience", "head_only"}
)


@dataclass(kw_only=True)
class Progress:
    """Progress of a run by steps or by wall clock, whichever ends it first.

    Attributes:
        num_steps: steps of the whole run, which may be none; None where only the budget ends it.
        budget_s: seconds of training of the whole run, without interruptions.
        step: steps done.
        elapsed_s: seconds of training before the clock was started.
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

    def restore(self, *, step: int, elapsed_s: float) -> None:
        """Restore a saved state."""
        self.step, self.elapsed_s = step, elapsed_s

    @property
    def seconds(self) -> float:
        """Seconds of training so far, over all interruptions."""
        running = 0.0 if self._started is None else time.monotonic() - self._started
        return self.elapsed_s + running

    @property
    def done(self) -> float:
        """The fraction of the run that is done, from 0 to 1."""
        if self.num_steps == 0:
            return 1.0
        by_steps = self.step / self.num_steps if self.num_steps else 0.0
        by_time = self.seconds / self.budget_s if self.budget_s else 0.0
        return min(1.0, max(by_steps, by_time))


def is_known_run(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the folder holds a run with these settings.

    Settings that its `run.json` lacks are not compared, nor are those of the run's end: a run can
    be extended.
    """
    known = read_record(folder)
    changed = list(_differences(known, settings))
    if changed:
        raise RunError(
            f"{folder} holds a run with {'; '.join(changed)}. "
            "Give the same options to resume it, or another --output"
        )
    return bool(known)


def read_record(folder: Path) -> dict[str, Any]:
    """Read the settings that `record_run` wrote; none where the folder holds no run."""
    file = folder / "run.json"
    if not file.is_file():
        return {}
    try:
        known: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise RunError(f"{file} is not JSON: {error}; give another --output") from error
    return known


def _differences(known: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ, one by one in nested objects too."""
    differences: list[str] = []
    for name, value in settings.items():
        before = known.get(name, value)
        if isinstance(before, dict) and isinstance(value, dict):
            differences += _differences(before, value)
        elif before != value and name not in _ENDS:
            differences.append(f"{name} {before!r}, not {value!r}")
    return differences


def record_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Create the run's folder and its `run.json`, which `is_known_run` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "run.json", json.dumps(dict(settings), indent=2).encode())


def run_precision(wanted: PrecisionName, folder: Path, world: World) -> PrecisionName:
    """Return the precision of a run, but not `auto`, which is the same in all its processes.

    A run that is resumed keeps the precision in its `run.json`. That of a new one is the wanted
    one; with `auto` the faster of the main process' device. A busy machine could measure otherwise
    at the next start, or in another process. All processes must call it.
    """
    names: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")
    number = 0
    if world.is_main:
        if wanted != "auto":
            is_known_run(folder, {"precision": wanted})
        name = read_record(folder).get("precision", wanted)
        dtype = product_dtype(world.device, name)
        if dtype == torch.bfloat16 and world.device.type == "cpu" and not cpu_has_bf16():
            print("warning: this CPU emulates bf16, which is very slow", file=sys.stderr)
        number = next(index for index, each in enumerate(names) if DTYPES[each] == dtype)
    (total,) = world.sum([number])
    return names[int(total)]
