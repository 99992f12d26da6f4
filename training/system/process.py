"""The process: signals, after which a run saves and stops, and reuse of memory between steps."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Final, TypeAlias

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Names of malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4
_NEVER: Final = (1 << 31) - 1
_Handlers: TypeAlias = "dict[signal.Signals, Any]"


class StopFlag:
    """Flag that SIGTERM, SIGINT and SIGUSR1 set; a second signal exits at once; for `with`.

    Args:
        echo_s: seconds after the first signal in which further ones are ignored.
    """

    def __init__(self, *, echo_s: float = 0.0) -> None:
        self.signal: int | None = None
        self._echo_s = echo_s
        self._came_at = 0.0
        self._before: _Handlers = {}

    def __enter__(self) -> StopFlag:
        # Python lets no other thread set handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._came_at = number, time.monotonic()
        elif time.monotonic() - self._came_at >= self._echo_s:
            raise SystemExit(128 + number)


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
