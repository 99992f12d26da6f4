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
# Memory over the least since the start; below it glibc keeps what it has for the next requests.
_KEPT_BYTES: Final = 8 << 20
_STATM: Final = Path("/proc/self/statm")


async def keep_memory_low() -> None:
    """Return free memory to the system, once a second while there may be much of it.

    A call that finds nothing to return takes some 2 ms, in a thread of its own.
    """
    least = num_anonymous_bytes()
    while least is not None:
        await asyncio.sleep(_CHECK_EVERY_S)
        now = num_anonymous_bytes()
        if now is None:
            return
        least = min(least, now)
        if now > least + _KEPT_BYTES:
            await asyncio.to_thread(return_free_memory)


def num_anonymous_bytes() -> int | None:
    """Return the resident memory of this process without pages of files; None if it is unknown."""
    try:
        _, resident, shared, *_ = map(int, _STATM.read_text(encoding="ascii").split())
    except OSError:  # not Linux
        return None
    return (resident - shared) * mmap.PAGESIZE
