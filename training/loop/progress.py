"""Progress of a run, its settings in `run.json`, and its precision."""

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

# Settings of a run's end, which may change when the run is resumed.
_END_SETTINGS: Final = frozenset(
    {"steps", "num_steps", "epochs", "budget", "budget_s", "patience", "head_only"}
)


@dataclass(kw_only=True)
class Progress:
    """Progress of a run by steps or by wall clock, whichever ends it first.

    Attributes:
        num_steps: number of steps of the complete run, which may be 0, or None if only the budget
            ends it.
        budget_s: seconds of training of the complete run, without interruptions.
        step: number of steps so far.
        elapsed_s: seconds of training before the clock started.
    """

    num_steps: int | None
    budget_s: float | None
    step: int = 0
    elapsed_s: float = 0.0
    _started: float | None = None

    def start_clock(self) -> None:
        """Start counting seconds of training."""
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
        """The completed fraction of the run, from 0 to 1."""
        if self.num_steps == 0:
            return 1.0
        by_steps = self.step / self.num_steps if self.num_steps else 0.0
        by_time = self.seconds / self.budget_s if self.budget_s else 0.0
        return min(1.0, max(by_steps, by_time))


def contains_run(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether the folder contains a run with these settings.

    Settings that its `run.json` lacks are not compared. Nor are the settings of the run's end,
    because a run can be extended.
    """
    record = read_record(folder)
    differences = list(_differences(record, settings))
    if differences:
        raise RunError(
            f"{folder} contains a run with {'; '.join(differences)}. "
            "Use the same options to resume it, or choose another --output."
        )
    return bool(record)


def read_record(folder: Path) -> dict[str, Any]:
    """Return the settings that `record_run` wrote, or an empty dict if there is no run."""
    file = folder / "run.json"
    if not file.is_file():
        return {}
    try:
        record: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise RunError(f"{file} is not JSON: {error}. Choose another --output.") from error
    return record


def _differences(record: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Describe each setting that differs, also within nested objects."""
    differences: list[str] = []
    for name, value in settings.items():
        recorded = record.get(name, value)
        if isinstance(recorded, dict) and isinstance(value, dict):
            differences += _differences(recorded, value)
        elif recorded != value and name not in _END_SETTINGS:
            differences.append(f"{name} {recorded!r}, not {value!r}")
    return differences


def record_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Create the run's folder and its `run.json`, which `contains_run` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "run.json", json.dumps(dict(settings), indent=2).encode())


def run_precision(requested: PrecisionName, folder: Path, world: World) -> PrecisionName:
    """Return the precision of a run, the same in all its processes and never `auto`.

    A resumed run has the precision in its `run.json`. A new run has the requested precision or, for
    `auto`, the one that is faster on the main process' device. Speed is measured only once: on a
    busy machine, the next start or another process may differ. All processes must call this.
    """
    names: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")
    index = 0
    if world.is_main:
        if requested != "auto":
            contains_run(folder, {"precision": requested})
        name = read_record(folder).get("precision", requested)
        dtype = product_dtype(world.device, name)
        if dtype == torch.bfloat16 and world.device.type == "cpu" and not cpu_has_bf16():
            print("warning: This CPU emulates bf16, which is very slow.", file=sys.stderr)
        index = [DTYPES[name] for name in names].index(dtype)
    (shared_index,) = world.sum([index])
    return names[int(shared_index)]
