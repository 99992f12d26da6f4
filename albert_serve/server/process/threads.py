"""The threads that read and answer requests, so that the event loop waits for none of them.

Large requests have one thread together. Python runs one thread at a time, so each further thread
that works would make all others wait longer for their turns; and large requests in the threads of
small ones would leave none for these.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache, partial
from typing import TypeVar, TypeVarTuple, Unpack

from albert_serve.errors import DeadlineExceededError

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


@cache
def _large_requests() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="large-requests")
