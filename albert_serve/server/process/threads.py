"""The threads that read and answer requests, so that the event loop waits for none of them.

On the CPU the engine's threads yield to all others: the event loop needs little, but at once.

Large requests have one thread together. Python runs one thread at a time, so each further thread
that works would make all others wait longer for their turns; and large requests in the threads of
small ones would leave none for these.
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
from functools import cache, partial
from typing import Final, TypeVar, TypeVarTuple, Unpack

from albert_serve.errors import DeadlineExceededError

# Their nice value over the process's: more would keep short requests waiting for the engine.
_ENGINE_NICENESS: Final = 4
_Args = TypeVarTuple("_Args")
_ResultT = TypeVar("_ResultT")


async def run_in_thread(
    function: Callable[[Unpack[_Args]], _ResultT],
    *args: *_Args,
    ends_s: float,
    is_large: bool = False,
) -> _ResultT:
    """Run a function off the event loop; one that exceeds the deadline is not awaited.

    One that has not begun when the request is cancelled never begins.

    Args:
        ends_s: the deadline, on `time.monotonic`'s clock.
        is_large: whether it may take more than some 10 ms.

    Raises:
        DeadlineExceededError: the deadline has passed.
    """
    run = partial(copy_context().run, function, *args)
    pool = _large_requests() if is_large else None
    try:
        async with asyncio.timeout(ends_s - time.monotonic()):
            return await asyncio.get_running_loop().run_in_executor(pool, run)
    except TimeoutError:
        raise DeadlineExceededError("no answer before the deadline; send less at once") from None


def lower_priority() -> None:
    """Make this thread, and those that it starts, yield to the others of the process."""
    if sys.platform == "linux":  # elsewhere a nice value is a process's
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, own + _ENGINE_NICENESS)


@cache
def _large_requests() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="large-requests")
