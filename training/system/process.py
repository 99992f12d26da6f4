"""The process: signals that stop a run after it has saved, and reuse of memory between steps."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from types import FrameType
from typing import Any, Final, TypeAlias

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Constants in glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4
_NEVER: Final = (1 << 31) - 1
_Handlers: TypeAlias = "dict[signal.Signals, Any]"


class StopFlag:
    """A flag that SIGTERM, SIGINT and SIGUSR1 set in a `with` statement.

    A second signal ends the process immediately.

    Args:
        echo_s: number of seconds after the first signal during which more signals are ignored.

    Attributes:
        signal: number of the first signal, or None before it.
    """

    def __init__(self, *, echo_s: float = 0.0) -> None:
        self.signal: int | None = None
        self._echo_s = echo_s
        self._first_at = 0.0
        self._previous_handlers: _Handlers = {}

    def __enter__(self) -> StopFlag:
        # Only the main thread can set handlers in Python.
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                number: signal.signal(number, self._handle) for number in STOPPING
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._first_at = number, time.monotonic()
        elif time.monotonic() - self._first_at >= self._echo_s:
            raise SystemExit(128 + number)


def keep_freed_memory() -> None:
    """Stop glibc from returning freed memory to the kernel.

    glibc returns large blocks as soon as they are freed. A training step on a CPU frees all its
    activations, so in the next step the kernel maps and zeroes the pages again. This takes a third
    of the step's time (docs/decisions.md). Without glibc, this function changes nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
