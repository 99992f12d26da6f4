"""Resident memory of processes on Linux."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Resident memory of a process, or the sum of several, in bytes.

    Attributes:
        pss_bytes: its share: a page that n processes map counts one nth.
        private_bytes: pages that no other process maps.
        shared_bytes: pages that others map too, in full.
        anonymous_bytes: pages of no file, which no other process can share.
        peak_bytes: the most that was resident at once, in full.
    """

    pss_bytes: int
    private_bytes: int
    shared_bytes: int
    anonymous_bytes: int
    peak_bytes: int


def read_memory(process: Path = Path("/proc/self")) -> Memory | None:
    """Return the memory of this process; None if the system does not report it.

    Args:
        process: the process' folder in /proc.
    """
    try:
        sizes = _read_sizes(process / "smaps_rollup") | _read_sizes(process / "status")
        return Memory(
            pss_bytes=sizes["Pss"],
            private_bytes=sizes["Private_Clean"] + sizes["Private_Dirty"],
            shared_bytes=sizes["Shared_Clean"] + sizes["Shared_Dirty"],
            anonymous_bytes=sizes["Anonymous"],
            peak_bytes=sizes["VmHWM"],
        )
    except (OSError, KeyError):
        return None


def mapped_pss_bytes(names: Collection[str], process: Path = Path("/proc/self")) -> int:
    """Return this process' PSS of mapped files of these names; 0 if it is not reported.

    Args:
        process: the process' folder in /proc.
    """
    total_bytes, counts = 0, False
    try:
        lines = (process / "smaps").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("Pss:") and counts:
            total_bytes += 1024 * int(line.split()[1])
        elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.rpartition("/")[2] in names
    return total_bytes


def _read_sizes(file: Path) -> dict[str, int]:
    """Return the values of lines "Name: N kB", in bytes."""
    fields = [line.split() for line in file.read_text().splitlines()]
    return {
        words[0].removesuffix(":"): 1024 * int(words[1])
        for words in fields
        if len(words) == 3 and words[2] == "kB"
    }
