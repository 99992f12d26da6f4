"""Work that is not awaited past its deadline, and then leaves nothing in memory."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from albert_serve.errors import DeadlineExceededError

_ResultT = TypeVar("_ResultT")


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
