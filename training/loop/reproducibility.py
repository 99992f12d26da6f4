"""Reproducible runs: sums in a fixed order, and one precision from the first step to the last."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import deterministic

from training.loop.distributed import World
from training.loop.progress import is_known_run, read_record
from training.system.precision import DTYPES, PrecisionName, cpu_has_bf16, product_dtype


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Use torch's deterministic algorithms on a CPU; for `with`. A GPU's are left as they are.

    The gradients of embeddings and of gathered rows are sums by index. Compiled by inductor,
    threads add to them atomically, in the order in which they arrive, so that the rounding differs
    from run to run. The deterministic sum takes the rows in their order, and less time, since no
    thread waits for another (docs/decisions.md). With the same number of threads, all other
    operations of a step are reproducible in any case.
    """
    if device.type != "cpu":
        yield
        return
    is_enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # Filling reveals reads of uninitialised memory; it would write each result twice.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_enabled, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


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
