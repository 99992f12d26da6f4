"""What else the machine did while a contestant had its turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")
_STAT: Final = Path("/proc/stat")
_IDLE_FIELDS: Final = (3, 4)  # idle, waiting for a disk
_NUM_FIELDS: Final = 8  # those after them count a second time
# Of a process' stat, after its name: time in user mode and in the kernel.
_PROCESS_FIELDS: Final = (11, 12)


class Witness:
    """Counts the processors' time that other programs, or other machines on the host, took."""

    def __init__(self) -> None:
        self._others_s = 0.0
        self._wall_s = 0.0

    def watch(self, pid: int, action: Callable[[], T]) -> T:
        """What the action gives, during which the process `pid` alone should work."""
        if not _STAT.is_file():
            return action()
        began, busy, own = time.perf_counter(), _busy_s(), _process_s(pid)
        result = action()
        self._others_s += max(0.0, _busy_s() - busy - (_process_s(pid) - own))
        self._wall_s += time.perf_counter() - began
        return result

    @property
    def others(self) -> float | None:
        """CPUs that others used on average; None where the system does not tell."""
        return self._others_s / self._wall_s if self._wall_s else None


def _busy_s() -> float:
    """Of all processors since the machine's start."""
    words = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    counts = [int(word) for word in words[:_NUM_FIELDS]]
    busy = sum(count for place, count in enumerate(counts) if place not in _IDLE_FIELDS)
    return busy / os.sysconf("SC_CLK_TCK")


def _process_s(pid: int) -> float:
    """Of a process and all its threads."""
    content = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    words = content.rpartition(")")[2].split()
    return sum(int(words[place]) for place in _PROCESS_FIELDS) / os.sysconf("SC_CLK_TCK")
