"""Large requests share one thread and one bound of memory; small ones stay on the event loop.

To read a small one takes less than the way to a thread and back. All large ones have one thread:
Python runs one thread at a time, so each further one that works would make all others wait longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Final, TypeVar, TypeVarTuple, Unpack

from albert_serve.batching.admission import limit_retry_after_s
from albert_serve.errors import DeadlineExceededError, QueueFullError

# Bodies of up to this size are read within some 2 ms.
SMALL_BYTES: Final = 1 << 12
# The time to read a byte, until it has been measured: that of a text of many words.
_USUAL_S_PER_BYTE: Final = 1e-6
_SMOOTHING: Final = 0.2
_Args = TypeVarTuple("_Args")
_ResultT = TypeVar("_ResultT")


class LargeRequests:
    """The thread and the memory of a process's large requests.

    The thread ends when nobody refers to this any more.

    Args:
        max_bytes: the limit of all large bodies that have not been answered.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_unread_bytes = 0
        self._s_per_byte = _USUAL_S_PER_BYTE
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large-requests")

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body, as they arrive, until `with` ends.

        Yields:
            A function of the body's bytes so far. It raises a QueueFullError if the body is large
            and there is no room beside the others: clients may leave bodies unfinished.
        """
        num_counted = 0

        def count(num_bytes: int) -> None:
            nonlocal num_counted
            if num_bytes <= SMALL_BYTES:
                return
            others = self._num_bytes - num_counted
            if others and others + num_bytes > self._max_bytes:
                raise QueueFullError(
                    f"bodies of {others} bytes are in progress and this one has no room: at most "
                    f"{self._max_bytes} are held at once; try again later"
                )
            self._num_bytes += num_bytes - num_counted
            num_counted = num_bytes

        try:
            yield count
        finally:
            self._num_bytes -= num_counted

    async def read(
        self,
        function: Callable[[Unpack[_Args]], _ResultT],
        *args: *_Args,
        num_bytes: int,
        ends_s: float,
    ) -> _ResultT:
        """Call a function that reads a body: here if it is small, otherwise in the thread.

        Raises:
            QueueFullError: it would wait for more than half of the time to its deadline.
            DeadlineExceededError: it did not end before the deadline.
        """
        if num_bytes <= SMALL_BYTES:
            return function(*args)
        wait_s = self._num_unread_bytes * self._s_per_byte
        if wait_s > (ends_s - time.monotonic()) / 2:
            raise QueueFullError(
                f"large requests are being read, which takes {wait_s:.2g} s; try again later, or "
                "send less at once",
                retry_after_s=limit_retry_after_s(wait_s),
            )
        self._num_unread_bytes += num_bytes
        try:
            timed = partial(_timed, partial(function, *args))
            result, seconds = await self.run(timed, num_bytes=num_bytes, ends_s=ends_s)
        finally:
            self._num_unread_bytes -= num_bytes
        self._s_per_byte += _SMOOTHING * (seconds / num_bytes - self._s_per_byte)
        return result

    async def run(
        self,
        function: Callable[[Unpack[_Args]], _ResultT],
        *args: *_Args,
        num_bytes: int,
        ends_s: float,
    ) -> _ResultT:
        """Call a function of a request: here if its body is small, otherwise in the thread.

        One that has not begun when the request is cancelled never begins, and one that exceeds the
        deadline is not awaited.

        Args:
            ends_s: the deadline, on `time.monotonic`'s clock.

        Raises:
            DeadlineExceededError: it did not end before the deadline.
        """
        if num_bytes <= SMALL_BYTES:
            return function(*args)
        run = partial(copy_context().run, function, *args)
        return await finish_in_time(
            asyncio.get_running_loop().run_in_executor(self._thread, run),
            ends_s,
            "no answer before the deadline; send less at once",
        )


async def finish_in_time(work: asyncio.Future[_ResultT], ends_s: float, message: str) -> _ResultT:
    """Return the result of `work`, which is cancelled at the deadline, or when the caller is.

    `asyncio.timeout` is avoided: its exceptions hold each other in a cycle, which keeps the body of
    each late request in memory until a garbage collection.

    Args:
        ends_s: the deadline, on `time.monotonic`'s clock.

    Raises:
        DeadlineExceededError: the work did not end before it; with this message.
    """
    try:
        await asyncio.wait({work}, timeout=max(0.0, ends_s - time.monotonic()))
        if work.done():
            return work.result()
        raise DeadlineExceededError(message)
    finally:
        work.cancel()
        # An exception's traceback holds this frame, and `work` the exception.
        del work


def _timed(function: Callable[[], _ResultT]) -> tuple[_ResultT, float]:
    """Return a function's result and the seconds that it took."""
    started_s = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started_s
