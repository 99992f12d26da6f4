"""Concurrent requests: in tasks (async) or in threads (sync).

`scripts/unasync.py` generates `sync_*.py` from `async_*.py` and removes `async_` from names of this
module.
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
    """Call a function with each item and yield the results in order.

    After a call has failed, no other call begins. The error is raised after the previous results.
    Closing the generator cancels the running calls.

    Args:
        function: function of an item.
        items: items, which are read as results are taken.
        limit: maximum number of concurrent calls.
        max_pending: maximum number of calls that run or whose results wait for a previous result.
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
    """Do the same as `async_in_order`, in threads.

    Closing the generator does not wait for the threads, which end with the program. Each call runs
    in a copy of the caller's context.
    """
    slots = threading.Semaphore(limit)
    pending: deque[Future[_ResultT]] = deque()
    has_failed = False

    def call(item: _ItemT, future: Future[_ResultT]) -> None:
        nonlocal has_failed
        try:
            result = function(item)
        except BaseException as error:  # noqa: BLE001  # raised with the result
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
    """Yield the rows of any iterable, and let other tasks run between them."""
    if isinstance(rows, AsyncIterable):
        async for row in rows:
            await asyncio.sleep(0)
            yield row
    else:
        for row in rows:
            await asyncio.sleep(0)
            yield row


def iterate(rows: Iterable[_RowT]) -> Generator[_RowT, None, None]:
    """Yield the rows from a generator, which can be closed, unlike an iterator."""
    yield from rows
