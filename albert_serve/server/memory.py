"""Memory that requests have freed goes back to the system: glibc would keep most of it.

A large request frees memory when its reply has been sent, when its client has gone, or when the
engine is done with it, so that no moment is the right one: memory is looked at once a second.
"""

from __future__ import annotations

import asyncio
import mmap
from pathlib import Path
from typing import Final

from albert_serve.runtime.ort import return_free_memory

_CHECK_EVERY_S: Final = 1.0
# Memory above the minimum since the start. glibc may hold less than this for the next requests.
_RETAINED_BYTES: Final = 8 << 20
_STATM: Final = Path("/proc/self/statm")


async def keep_memory_low() -> None:
    """Return free memory to the system, once a second while there may be much of it.

    A call that finds nothing to return takes some 2 ms, in a thread of its own.
    """
    minimum = num_anonymous_bytes()
    while minimum is not None:
        await asyncio.sleep(_CHECK_EVERY_S)
        num_bytes = num_anonymous_bytes()
        if num_bytes is None:
            return
        minimum = min(minimum, num_bytes)
        if num_bytes > minimum + _RETAINED_BYTES:
            await asyncio.to_thread(return_free_memory)


def num_anonymous_bytes() -> int | None:
    """Return the resident memory of this process without pages of files; None if it is unknown."""
    try:
        _, resident, shared, *_ = map(int, _STATM.read_text(encoding="ascii").split())
    except OSError:  # the file exists only on Linux
        return None
    return (resident - shared) * mmap.PAGESIZE
