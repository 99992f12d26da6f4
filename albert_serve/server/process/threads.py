"""The threads that read and answer requests, so that the event loop waits for none of them.

The event loop needs little, but at once: so these threads and, on the CPU, the engine's yield to
it. What takes less than the way to a thread and back stays on the event loop.

Large requests have one thread together. Python runs one thread at a time, so each further thread
that works would make all others wait longer for their turns; and large requests in the threads of
others would leave none for these.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from enum import IntEnum
from functools import partial
from typing import Final, TypeVar, TypeVarTuple, Unpack

from albert_serve.errors import DeadlineExceededError
from albert_serve.settings import num_usable_cpus

# The fewest threads for requests of medium effort. There is one for each CPU: more would not be
# faster, and the event loop takes turns with all that run Python.
_LEAST_MEDIUM: Final = 2
# Over the process's: a higher one would keep short requests waiting for the engine.
_NICENESS: Final = 4
# How long a thread runs Python while others wait; Python's default is 5 ms.
_SWITCH_INTERVAL_S: Final = 0.0005
_Args = TypeVarTuple("_Args")
_ResultT = TypeVar("_ResultT")


class Effort(IntEnum):
    """The time that a function of a request may take."""

    SMALL = 0
    """Up to some 1 ms."""
    MEDIUM = 1
    """Up to some 10 ms."""
    LARGE = 2


class RequestThreads:
    """The threads of a process's requests. They end when nobody refers to this any more.

    Args:
        start_thread: called in each thread when it starts.
    """

    def __init__(self, start_thread: Callable[[], None] | None = None) -> None:
        self._pools = {
            Effort.MEDIUM: ThreadPoolExecutor(
                max(_LEAST_MEDIUM, num_usable_cpus()),
                thread_name_prefix="requests",
                initializer=start_thread,
            ),
            Effort.LARGE: ThreadPoolExecutor(
                1, thread_name_prefix="large-requests", initializer=start_thread
            ),
        }

    async def run(
        self,
        function: Callable[[Unpack[_Args]], _ResultT],
        *args: *_Args,
        ends_s: float,
        effort: Effort,
    ) -> _ResultT:
        """Run a function where its effort belongs: a small one at once, others in a thread.

        One in a thread that exceeds the deadline is not awaited, and one that has not begun when
        the request is cancelled never begins.

        Args:
            ends_s: the deadline, on `time.monotonic`'s clock.

        Raises:
            DeadlineExceededError: the deadline has passed, before one in a thread has ended.
        """
        if effort is Effort.SMALL:
            return function(*args)
        try:
            async with asyncio.timeout(ends_s - time.monotonic()):
                run = partial(copy_context().run, function, *args)
                return await asyncio.get_running_loop().run_in_executor(self._pools[effort], run)
        except TimeoutError:
            raise DeadlineExceededError(
                "no answer before the deadline; send less at once"
            ) from None


def lower_priority() -> None:
    """Make this thread, and those that it starts, yield to the others of the process."""
    if sys.platform == "linux":  # elsewhere a nice value is a process's
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, own + _NICENESS)


def take_short_turns() -> None:
    """Make the threads of this process take turns of 0.5 ms to run Python.

    The event loop gives the interpreter up whenever it calls the system, and each time would wait
    for a whole turn of another thread.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
