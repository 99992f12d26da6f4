"""The number of threads of training, with other work on the same cores."""

from __future__ import annotations

import os
from typing import Final

import psutil
import torch
from torch import distributed

# Over which the load of the cores is measured.
_SAMPLE_S: Final = 0.3


def use_threads(num_threads: int | None) -> None:
    """Compute in so many threads; by default in as many as there are idle cores now.

    Torch's threads wait for each other actively. Where another process has one of their cores,
    all of them wait for the one that shares it, and fewer are faster. The processes of torchrun
    have the number that it set.
    """
    most = torch.get_num_threads()
    if num_threads is None and most > 1 and not distributed.is_torchelastic_launched():
        num_threads = max(1, min(most, _count_idle_cores()))
        if num_threads < most:
            print(
                f"other processes keep cores busy: training computes in {num_threads} of {most} "
                "threads (--threads says otherwise)"
            )
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _count_idle_cores() -> int:
    """Return the number of this process' cores that have nothing to do."""
    loads = psutil.cpu_percent(_SAMPLE_S, percpu=True)
    if hasattr(os, "sched_getaffinity"):  # Linux
        loads = [loads[core] for core in os.sched_getaffinity(0)]
    return len(loads) - round(sum(loads) / 100)
