"""Repeated timing within a bounded time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MOST_RUNS: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The seconds of several runs of a call."""

    median_s: float
    fastest_s: float
    num_runs: int


def time_runs(run: Callable[[], object], *, budget_s: float) -> Timing:
    """Time a call repeatedly until the budget is spent, at least once.

    The first call is not counted, for it does what only a first call has to; but where it spends
    the budget alone, it is the one that counts.
    """
    first_s = time_once(run)
    times_s = [] if first_s < budget_s else [first_s]
    while not times_s or (first_s + sum(times_s) < budget_s and len(times_s) < _MOST_RUNS):
        times_s.append(time_once(run))
    return Timing(
        median_s=statistics.median(times_s), fastest_s=min(times_s), num_runs=len(times_s)
    )


def time_once(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s
