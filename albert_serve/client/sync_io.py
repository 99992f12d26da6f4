"""The I/O of the client for threads: the steps of conversations, in this thread or in several."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from typing import Any, Self

import httpx

from albert_serve.client.calls import Call, ReplyT
from albert_serve.client.deadlines import Cancellation, keep_deadlines, limited_to, pause
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


class SyncIO:
    """Performs the steps of conversations.

    Args:
        server: the service, and the options of calls.
        http_client: of the caller; None for a new one.
    """

    def __init__(self, server: Server, http_client: httpx.Client | None) -> None:
        self._server = server
        self._exchange = Exchange(server)
        self._http = http_client or httpx.Client(limits=server.connection_limits)
        keep_deadlines(self._http)
        self._is_own = http_client is None

    def _send(self, call: Call[ReplyT]) -> ReplyT:
        return self._hold(self._exchange.converse(call))

    def _hold(self, conversation: Conversation[ReplyT]) -> ReplyT:
        # Closed here: at the program's end the collector would close parts of it before the whole.
        with closing(conversation):
            try:
                step = next(conversation)
                while True:
                    step = conversation.send(self._do(step))
            except StopIteration as end:
                reply: ReplyT = end.value
                return reply

    def _do(self, step: Send | Wait | Together) -> Outcome:
        if isinstance(step, Send):
            return self._perform(step)
        if isinstance(step, Together):
            return self._hold_together(step)
        pause(step.delay_s)
        return None

    def _perform(self, step: Send) -> Outcome:
        ends_s = time.monotonic() + step.timeout_s
        try:
            with (
                limited_to(step.timeout_s),
                self._http.stream(
                    step.call.method,
                    self._server.base_url + step.call.path,
                    json=step.call.body,
                    headers=self._server.headers,
                    timeout=step.timeout_s,
                ) as response,
            ):
                body = self._server.body(response)
                for chunk in () if response.is_stream_consumed else response.iter_raw():
                    body.add(chunk)
                    if time.monotonic() > ends_s:
                        return httpx.ReadTimeout("the response did not end in time")
        except (httpx.HTTPError, RequestError) as error:
            return error
        return Received.of(response, body)

    def _hold_together(self, step: Together) -> list[Any]:
        if self._server.max_concurrency == 1:
            return [self._hold(conversation) for conversation in step.conversations]
        with _Workers(self._server.max_concurrency) as workers:
            for conversation in step.conversations:
                workers.submit(self._hold, conversation)
            return [workers.result() for _ in step.conversations]

    def _stream(self, rows: Iterable[Any], build: Build) -> Generator[Any, None, None]:
        """Return the answers to rows, in order; an error in place of that of a refused row."""
        check_rows(rows, Iterable)
        return self._answer_rows(rows, build)

    def _answer_rows(self, rows: Iterable[Any], build: Build) -> Generator[Any, None, None]:
        stream = RowStream(
            exchange=self._exchange,
            build=build,
            limits=self._hold(self._exchange.fetch_limits()),
            progress=Progress(),
        )
        source = _Source(rows)
        with _Workers(self._server.max_concurrency) as workers:
            for batch in _batches(source, workers):
                workers.submit(self._hold, stream.answer(batch))
                while workers.is_full or workers.has_result:
                    yield from workers.result()
            while workers.num_pending:
                yield from workers.result()
        if source.error is not None:
            raise source.error


def _batches(source: _Source, workers: _Workers) -> Iterator[Batch]:
    """Group rows: as many as a request has, or those at hand while the service has no work."""
    start = 0
    rows: list[Any] = []
    for row in source:
        rows.append(row)
        if len(rows) == ROWS_PER_REQUEST or workers.is_idle:
            yield Batch(start=start, rows=rows)
            start += len(rows)
            rows = []
    if rows:
        yield Batch(start=start, rows=rows)


class _Source:
    """The caller's rows, up to an error of theirs, which is kept until their answers are taken."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = rows
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._rows
        except Exception as error:  # noqa: BLE001  # raised by the stream, after the answers
            self.error = error


class _Workers:
    """Calls functions in threads, in order; the end of `with` cancels those that are not done.

    A function runs in a copy of the caller's context. Once one has failed none after it begins.

    Args:
        num_threads: the limit of functions at once.
    """

    def __init__(self, num_threads: int) -> None:
        self._max_pending = REQUESTS_AHEAD * num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="albert-client")
        self._pending: deque[Future[Any]] = deque()
        self._cancellation = Cancellation()
        self._num_submitted = 0
        self._lock = threading.Lock()
        self._first_failed = math.inf  # the lowest number of a function that has failed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancellation.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def num_pending(self) -> int:
        """The number of functions whose results are not taken."""
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether a result should be taken before the next function."""
        return len(self._pending) >= self._max_pending

    @property
    def is_idle(self) -> bool:
        """Whether all functions are done."""
        return all(future.done() for future in self._pending)

    @property
    def has_result(self) -> bool:
        """Whether the next result is there."""
        return bool(self._pending) and self._pending[0].done()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function when its turn comes."""
        run = copy_context().run
        number = self._num_submitted
        self._num_submitted += 1
        self._pending.append(self._pool.submit(run, self._call, number, function, *arguments))

    def result(self) -> Any:
        """Wait for the first function whose result is not taken, and return it or raise."""
        return self._pending.popleft().result()

    def _call(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        if number > self._first_failed:
            raise CancelledError
        try:
            with self._cancellation.applied():
                self._cancellation.check()
                return function(*arguments)
        except BaseException:
            with self._lock:
                self._first_failed = min(self._first_failed, number)
            raise
