"""Several requests at once: in tasks (async) or in threads (sync).

`scripts/unasync.py` makes `sync_*.py` of `async_*.py`; a name of this module loses its `async_`
there.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Generator,
    Iterable,
)
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeAlias, TypeVar

_RowT = TypeVar("_RowT")
_ItemT = TypeVar("_ItemT")
_ResultT = TypeVar("_ResultT")
AnyIterable: TypeAlias = Iterable[_RowT] | AsyncIterable[_RowT]


async def async_in_order(
    function: Callable[[_ItemT], Awaitable[_ResultT]],
    items: AsyncIterable[_ItemT],
    *,
    limit: int,
    max_pending: int,
) -> AsyncGenerator[_ResultT, None]:
    """Call a function with each item, up to `limit` at once, and yield the results in order.

    At most `max_pending` calls run, or have results that wait for an earlier one. Once a call has
    failed no other begins; its error comes after the results before it. The end cancels the calls
    that run.
    """
    slots = asyncio.Semaphore(limit)
    pending: deque[asyncio.Task[_ResultT]] = deque()
    has_failed = False

    async def call(item: _ItemT) -> _ResultT:
        nonlocal has_failed
        try:
            return await function(item)
        except BaseException:
            has_failed = True
            raise
        finally:
            slots.release()

    try:
        async for item in items:
            await slots.acquire()
            if has_failed:
                break
            pending.append(asyncio.create_task(call(item)))
            while pending and (pending[0].done() or len(pending) >= max_pending):
                await asyncio.wait([pending[0]])
                yield pending.popleft().result()
        while pending:
            await asyncio.wait([pending[0]])
            yield pending.popleft().result()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def in_order(
    function: Callable[[_ItemT], _ResultT],
    items: Iterable[_ItemT],
    *,
    limit: int,
    max_pending: int,
) -> Generator[_ResultT, None, None]:
    """Do as `async_in_order`, in threads; the end waits for none of them.

    They end with the program. Each call runs in a copy of the caller's context.
    """
    slots = threading.Semaphore(limit)
    pending: deque[Future[_ResultT]] = deque()
    has_failed = False

    def call(item: _ItemT, future: Future[_ResultT]) -> None:
        nonlocal has_failed
        try:
            result = function(item)
        except BaseException as error:  # noqa: BLE001  # raised where the result is taken
            has_failed = True
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            slots.release()

    for item in items:
        slots.acquire()
        if has_failed:
            break
        pending.append(Future())
        run = copy_context().run
        threading.Thread(target=run, args=(call, item, pending[-1]), daemon=True).start()
        while pending and (pending[0].done() or len(pending) >= max_pending):
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


async def async_iterate(rows: AnyIterable[_RowT]) -> AsyncGenerator[_RowT, None]:
    """Yield rows of either kind; other tasks run between them."""
    if isinstance(rows, AsyncIterable):
        async for row in rows:
            await asyncio.sleep(0)
            yield row
    else:
        for row in rows:
            await asyncio.sleep(0)
            yield row


def iterate(rows: Iterable[_RowT]) -> Generator[_RowT, None, None]:
    """Yield the rows; the generator, unlike an iterator of any kind, can be closed."""
    yield from rows
