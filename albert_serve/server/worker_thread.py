"""Large requests are read and answered in one thread, small ones on the event loop.

Handing a small request to a thread takes longer than reading it. One thread serves all large
requests: Python runs one thread at a time, so more threads would only make all others wait longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Final, TypeVar, TypeVarTuple, Unpack

from albert_serve.errors import DeadlineExceededError

# A body of this size is read within about 2 ms.
SMALL_BYTES: Final = 1 << 12
_Args = TypeVarTuple("_Args")
_ResultT = TypeVar("_ResultT")


class WorkerThread:
    """The thread for the large requests of a process. It ends when this object is freed."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="large-requests")

    async def run(
        self,
        function: Callable[[Unpack[_Args]], _ResultT],
        *args: *_Args,
        num_bytes: int,
        ends_s: float,
    ) -> _ResultT:
        """Call a function of a request: here if its body is small, otherwise in the thread.

        If the request is cancelled before the call begins, it never begins. If the call exceeds the
        deadline, its result is dropped.

        Args:
            num_bytes: size of the request's body.
            ends_s: the deadline, on `time.monotonic`'s clock.
        """
        if num_bytes <= SMALL_BYTES:
            return function(*args)
        run = partial(copy_context().run, function, *args)
        return await finish_in_time(
            asyncio.get_running_loop().run_in_executor(self._executor, run),
            ends_s,
            "there was no answer before the deadline. Send fewer inputs per request.",
        )


async def finish_in_time(work: asyncio.Future[_ResultT], ends_s: float, message: str) -> _ResultT:
    """Return the result of `work`, which is cancelled at the deadline, or with the caller.

    `asyncio.timeout` is avoided: its exceptions refer to each other, which keeps the body of each
    late request in memory until a garbage collection.

    Args:
        ends_s: the deadline, on `time.monotonic`'s clock.

    Raises:
        DeadlineExceededError: the work did not end before the deadline; has this message.
    """
    try:
        await asyncio.wait({work}, timeout=max(0.0, ends_s - time.monotonic()))
        if work.done():
            return work.result()
        raise DeadlineExceededError(message)
    finally:
        work.cancel()
        # An exception's traceback refers to this frame, and `work` to the exception.
        del work
