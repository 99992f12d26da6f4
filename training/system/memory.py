"""Reuse of a CPU's memory between steps."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

# Names of malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4
_NEVER: Final = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Stop glibc from returning freed memory to the kernel.

    glibc returns large blocks as soon as they are freed. A training step on a CPU frees all its
    activations, and the next one has the kernel map and zero the pages again: a third of its time
    (docs/decisions.md). Without glibc nothing changes.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
