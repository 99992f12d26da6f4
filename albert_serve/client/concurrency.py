"""Several requests at once, in tasks or in threads: what a generated sync client cannot share.

`scripts/unasync.py` makes `sync_*.py` of `async_*.py`; a name of this module loses its `async_` or
`Async` there.
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
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

_RowT = TypeVar("_RowT")
_FutureT = TypeVar("_FutureT", bound="asyncio.Future[Any] | Future[Any]")
AnyIterable: TypeAlias = Iterable[_RowT] | AsyncIterable[_RowT]

# Results that may wait for an earlier one, for each function that runs at once.
_RESULTS_AHEAD: Final = 2


class _Pending(Generic[_FutureT]):
    """The functions whose results are not taken, in order.

    Args:
        limit: of functions at once.

    Attributes:
        has_failed: whether a function has failed, after which no other begins.
    """

    def __init__(self, limit: int) -> None:
        self.has_failed = False
        self._limit = limit
        self._pending: deque[_FutureT] = deque()

    @property
    def num_pending(self) -> int:
        """The number of functions whose results are not taken."""
        return len(self._pending)

    @property
    def is_idle(self) -> bool:
        """Whether all functions are done."""
        return all(future.done() for future in self._pending)

    @property
    def has_result(self) -> bool:
        """Whether the next result is to be taken before another function begins."""
        is_full = len(self._pending) >= _RESULTS_AHEAD * self._limit
        return is_full or (bool(self._pending) and self._pending[0].done())


class AsyncWorkers(_Pending["asyncio.Task[Any]"]):
    """Calls functions in tasks that begin in order; the end of `with` cancels those that run."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._slots = asyncio.Semaphore(limit)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def submit(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        """Call a function as soon as fewer than the limit run; do nothing once one has failed."""
        await self._slots.acquire()
        if self.has_failed:
            self._slots.release()
        else:
            self._pending.append(asyncio.create_task(self._call(function, *arguments)))

    async def result(self) -> Any:
        """Wait for the first function whose result is not taken, and return it or raise."""
        result = await self._pending[0]
        self._pending.popleft()
        return result

    async def _call(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        try:
            return await function(*arguments)
        except BaseException:
            self.has_failed = True
            raise
        finally:
            self._slots.release()


class Workers(_Pending["Future[Any]"]):
    """Calls functions in threads that begin in order; the end of `with` waits for none of them.

    The threads end with the program. Each function runs in a copy of the caller's context.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._slots = threading.Semaphore(limit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.has_failed = True

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function as soon as fewer than the limit run; do nothing once one has failed."""
        self._slots.acquire()
        if self.has_failed:
            self._slots.release()
            return
        future: Future[Any] = Future()
        self._pending.append(future)
        run = copy_context().run
        threading.Thread(
            target=run, args=(self._call, future, function, *arguments), daemon=True
        ).start()

    def result(self) -> Any:
        """Wait for the first function whose result is not taken, and return it or raise."""
        return self._pending.popleft().result()

    def _call(self, future: Future[Any], function: Callable[..., Any], *arguments: Any) -> None:
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001  # raised where the result is taken
            self.has_failed = True
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            self._slots.release()


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
