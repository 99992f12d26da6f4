"""How much memory this process has."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

from benchmarks.engines.jobs import Memory

_MAPS: Final = Path("/proc/self/smaps_rollup")
_BYTES_A_KIB: Final = 1024


def read_memory() -> Memory:
    """Of this process, now; where the system does not tell, the most until now stands for all."""
    try:
        lines = _MAPS.read_text(encoding="ascii").splitlines()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_A_KIB
        return Memory(rss_bytes=most, pss_bytes=most, anonymous_bytes=most)
    fields = dict(line.split(":", 1) for line in lines[1:])
    rss, pss, anonymous = (
        int(fields[name].split()[0]) * _BYTES_A_KIB for name in ("Rss", "Pss", "Anonymous")
    )
    return Memory(rss_bytes=rss, pss_bytes=pss, anonymous_bytes=anonymous)
