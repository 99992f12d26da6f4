"""The I/O of the client for asyncio: the twin of `sync_io.py`, with tasks in place of threads."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
)
from typing import Any, Self, TypeAlias, TypeVar

import httpx

from albert_serve.client.calls import Call, ReplyT
from albert_serve.client.replies import Received
from albert_serve.client.server import Server
from albert_serve.client.streaming import (
    REQUESTS_AHEAD,
    ROWS_PER_REQUEST,
    Batch,
    Build,
    RowStream,
    check_rows,
)
from albert_serve.client.transport import (
    Conversation,
    Exchange,
    Outcome,
    Progress,
    Send,
    Together,
    Wait,
)
from albert_serve.errors import RequestError

_ArgumentT = TypeVar("_ArgumentT")
_Hold: TypeAlias = Callable[[Conversation[list[Any]]], Coroutine[Any, Any, list[Any]]]


class AsyncIO:
    """Performs the steps of conversations.

    Args:
        server: the service, and the options of calls.
        http_client: of the caller; None for a new one.
    """

    def __init__(self, server: Server, http_client: httpx.AsyncClient | None) -> None:
        self._server = server
        self._exchange = Exchange(server)
        self._http = http_client or httpx.AsyncClient(limits=server.connection_limits)
        self._is_own = http_client is None

    async def _send(self, call: Call[ReplyT]) -> ReplyT:
        return await self._hold(self._exchange.converse(call))

    async def _hold(self, conversation: Conversation[ReplyT]) -> ReplyT:
        try:
            step = next(conversation)
            while True:
                step = conversation.send(await self._do(step))
        except StopIteration as end:
            reply: ReplyT = end.value
            return reply

    async def _do(self, step: Send | Wait | Together) -> Outcome:
        if isinstance(step, Send):
            return await self._perform(step)
        if isinstance(step, Together):
            return await self._hold_together(step)
        await asyncio.sleep(step.delay_s)
        return None

    async def _perform(self, step: Send) -> Outcome:
        try:
            async with (
                asyncio.timeout(step.timeout_s),
                self._http.stream(
                    step.call.method,
                    self._server.base_url + step.call.path,
                    json=step.call.body,
                    headers=self._server.headers,
                    timeout=step.timeout_s,
                ) as response,
            ):
                body = self._server.body(response)
                if not response.is_stream_consumed:
                    async for chunk in response.aiter_raw():
                        body.add(chunk)
        except TimeoutError:
            return httpx.ReadTimeout("the response did not end in time")
        except (httpx.HTTPError, RequestError) as error:
            return error
        return Received.of(response, body)

    async def _hold_together(self, step: Together) -> list[Any]:
        async with _Tasks(self._server.max_concurrency) as tasks:
            held = [tasks.start(self._hold, each) for each in step.conversations]
            return [await task for task in held]

    def _stream(
        self, rows: Iterable[Any] | AsyncIterable[Any], build: Build
    ) -> AsyncGenerator[Any, None]:
        """Return the answers to rows, in order; an error in place of that of a refused row."""
        check_rows(rows, Iterable, AsyncIterable)
        return self._answer_rows(rows, build)

    async def _answer_rows(
        self, rows: Iterable[Any] | AsyncIterable[Any], build: Build
    ) -> AsyncGenerator[Any, None]:
        stream = RowStream(
            exchange=self._exchange,
            build=build,
            limits=await self._hold(self._exchange.fetch_limits()),
            progress=Progress(),
        )
        async with _Tasks(self._server.max_concurrency) as tasks:
            reader = _Reader(self._hold, stream, tasks)
            reading = asyncio.create_task(reader.read(rows))
            try:
                while (answering := await reader.begun.get()) is not None:
                    for result in await answering:
                        yield result
                    reader.free.release()
                await reading  # raises an error of the rows, after the answers before it
            finally:
                tasks.close()
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


class _Reader:
    """Reads rows, and starts to answer them as many at once as a request has.

    While nothing is being answered it does not wait for more rows.

    Attributes:
        begun: tasks that answer a batch, in order; None is the end.
        free: the number of batches that may be read ahead.
    """

    def __init__(self, hold: _Hold, stream: RowStream, tasks: _Tasks) -> None:
        self.begun: asyncio.Queue[asyncio.Task[list[Any]] | None] = asyncio.Queue()
        self.free = asyncio.Semaphore(REQUESTS_AHEAD * tasks.limit)
        self._hold = hold
        self._stream = stream
        self._tasks = tasks
        self._start = 0
        self._rows: list[Any] = []

    async def read(self, rows: Iterable[Any] | AsyncIterable[Any]) -> None:
        """Read rows to their end, or to an error of theirs, which is raised."""
        try:
            async for row in _asynchronous(rows):
                if self._tasks.is_closed:
                    break
                if not self._rows:
                    await self.free.acquire()
                self._rows.append(row)
                if len(self._rows) == ROWS_PER_REQUEST or self._tasks.is_idle:
                    self._answer()
        finally:
            self._answer()
            self.begun.put_nowait(None)

    def _answer(self) -> None:
        if not self._rows or self._tasks.is_closed:
            return
        batch = Batch(start=self._start, rows=self._rows)
        self._start += len(batch.rows)
        self._rows = []
        task = self._tasks.start(self._hold, self._stream.answer(batch))
        task.add_done_callback(self._answer_more)
        self.begun.put_nowait(task)

    def _answer_more(self, _: asyncio.Task[list[Any]]) -> None:
        if self._tasks.is_idle:
            self._answer()


async def _asynchronous(rows: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(rows, AsyncIterable):
        async for row in rows:
            yield row
    else:
        for row in rows:
            yield row
            await asyncio.sleep(0)  # so that other tasks run between rows


class _Tasks:
    """Runs functions in tasks, in order; the end of `with` cancels those that are not done.

    Once one has failed no other begins.

    Args:
        limit: of functions at once.

    Attributes:
        is_closed: whether no function begins any more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_closed = False
        self._slots = asyncio.Semaphore(limit)
        self._running: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def close(self) -> None:
        """Let no other function begin."""
        self.is_closed = True

    @property
    def is_idle(self) -> bool:
        """Whether all functions are done."""
        return not self._running

    def start(
        self, function: Callable[[_ArgumentT], Coroutine[Any, Any, Any]], argument: _ArgumentT
    ) -> asyncio.Task[Any]:
        """Return a task that calls a function when its turn comes."""
        task = asyncio.create_task(self._call(function, argument))
        self._running.add(task)
        task.add_done_callback(self._take)
        return task

    def _take(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio would log those after the first

    async def _call(
        self, function: Callable[[_ArgumentT], Coroutine[Any, Any, Any]], argument: _ArgumentT
    ) -> Any:
        async with self._slots:
            if self.is_closed:
                raise asyncio.CancelledError
            try:
                return await function(argument)
            except BaseException:
                self.close()
                raise
