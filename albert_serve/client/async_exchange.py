"""The exchange with a service: requests and retries, lists in parts, streams, and readiness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Self, TypeAlias, cast

import httpx
from pydantic import BaseModel

from albert_serve.api.schemas import InfoReply
from albert_serve.client.calls import Call, RawReply, ReplyT
from albert_serve.client.concurrency import AnyIterable, async_in_order, async_iterate
from albert_serve.client.requests import HEALTH, INFO, AnswerT, CallSpec
from albert_serve.client.retries import (
    RETRIED_STATUSES,
    TRANSIENT_ERRORS,
    CallProgress,
    Deadline,
    Retries,
)
from albert_serve.client.server import Server
from albert_serve.errors import (
    BodyTooLargeError,
    ConfigError,
    DeadlineExceededError,
    InvalidInputError,
    NotReadyError,
    RequestError,
    TooMuchAtOnceError,
)

# In requests of this size, the fixed cost of a request is small.
_ROWS_PER_REQUEST: Final = 32
_MAX_PROBE_S: Final = 5.0
_FIRST_PROBE_DELAY_S: Final = 0.1
_MAX_PROBE_DELAY_S: Final = 2.0

# Index of the first row, and the rows or the error of their iterator.
_Batch: TypeAlias = tuple[int, list[Any] | Exception]


class AsyncAnswerStream(AsyncIterator[Any]):
    """An iterator over the answers to rows, in the order of the rows.

    The stream reads about 500 rows ahead and sends them in requests of 32, so memory is bounded. If
    the rows' iterator raises an error, the stream raises it after the answers to previous rows.
    After the end of `async with`, or `aclose`, no other request is sent.

    A rejected row raises its error and ends the stream. With `with_errors`, the stream continues.
    `error.input_index` is the row's index. All other errors end the stream: a service that is
    overloaded or unreachable after all retries, an invalid key or option.
    """

    def __init__(self, results: AsyncGenerator[Any, None]) -> None:
        self._results = results

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        result = await anext(self._results)
        if isinstance(result, RequestError):
            await self.aclose()
            raise result
        return result

    def with_errors(self) -> AsyncGenerator[Any, None]:
        """Return the stream with the error of a rejected row in place of its answer."""
        return self._results

    async def aclose(self) -> None:
        """End the stream."""
        await self._results.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncExchange:
    """A sender of calls to one service, which caches the service's limits.

    Args:
        server: address of the service, and options of calls.
        http_client: httpx client of the caller, or None for a new client.

    Attributes:
        is_own: whether `aclose` closes the httpx client.
    """

    def __init__(self, server: Server, http_client: httpx.AsyncClient | None) -> None:
        self._server = server
        self._http = http_client or server.open_http(httpx.AsyncClient)
        self.is_own = http_client is None
        self._limits: InfoReply | None = None

    async def aclose(self) -> None:
        """Close the connections, unless the httpx client belongs to the caller."""
        if self.is_own:
            await self._http.aclose()

    async def call(
        self, spec: CallSpec[AnswerT], inputs: object, options: Mapping[str, Any]
    ) -> AnswerT | list[AnswerT]:
        """Return the answer to an input, or the answers to a list; see `send`."""
        answer: AnswerT | list[AnswerT] = await self.send(spec.call(inputs, options))
        return answer

    async def send(self, call: Call[ReplyT]) -> ReplyT:
        """Return the answer to a call. A list is split into parts within the service's limits."""
        deadline, progress = self._deadline(), CallProgress()
        if call.num_items < 2:
            return await self._try(call, deadline, progress)
        parts = call.parts(await self._fetch_limits(deadline))
        if len(parts) == 1:
            return cast("ReplyT", await self._answer(parts, deadline, progress))
        results = async_in_order(
            partial(self._answer, deadline=deadline, progress=progress),
            async_iterate([part] for part in parts),
            limit=self._server.max_concurrency,
            max_pending=len(parts),
        )
        answers = [answer async for part_answers in results for answer in part_answers]
        return cast("ReplyT", answers)  # the answer to a list is a list

    def stream(
        self, spec: CallSpec[Any], rows: AnyIterable[Any], options: Mapping[str, Any]
    ) -> AsyncAnswerStream:
        """Return the answers to rows, in order."""
        if isinstance(rows, str | bytes | Mapping | BaseModel):
            raise InvalidInputError(
                f"rows has the type {type(rows).__name__}. Pass an iterable of inputs, such as a "
                "list or a generator."
            )
        return AsyncAnswerStream(self._stream(spec, rows, options))

    async def _stream(
        self, spec: CallSpec[Any], rows: AnyIterable[Any], options: Mapping[str, Any]
    ) -> AsyncGenerator[Any, None]:
        limits = await self._fetch_limits(self._deadline())
        answer_rows = partial(self._answer_rows, spec, options, limits, CallProgress())
        limit = self._server.max_concurrency
        async with (
            aclosing(_batches(rows)) as batches,
            aclosing(
                async_in_order(answer_rows, batches, limit=limit, max_pending=2 * limit)
            ) as results,
        ):
            async for answers in results:
                for answer in answers:
                    yield answer

    async def probe(self, timeout_s: float | None = None) -> RequestError | None:
        """Return the error of a health check, or None if the service accepts requests."""
        deadline = Deadline(self._server.base_url, timeout_s or self._server.timeout_s)
        try:
            HEALTH.answer(await self._receive(HEALTH, deadline))
        except TRANSIENT_ERRORS as error:
            return error
        return None

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Check the service's health until it accepts requests."""
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s is {timeout_s}. It must be more than 0.")
        deadline = Deadline(self._server.base_url, timeout_s)
        delay_s = _FIRST_PROBE_DELAY_S
        while error := await self.probe(min(_MAX_PROBE_S, deadline.remaining_s())):
            if not deadline.allows(delay_s):
                is_late = isinstance(error, DeadlineExceededError)
                raise NotReadyError(
                    f"{self._server.base_url} was not ready within {timeout_s:g} s. "
                    f"The last attempt: {'No reply in time.' if is_late else error}"
                ) from error
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_PROBE_DELAY_S)

    def _deadline(self) -> Deadline:
        return Deadline(self._server.base_url, self._server.timeout_s)

    async def _fetch_limits(self, deadline: Deadline) -> InfoReply:
        if self._limits is None:
            self._limits = await self._try(INFO, deadline, CallProgress())
        return self._limits

    async def _answer_rows(
        self,
        spec: CallSpec[Any],
        options: Mapping[str, Any],
        limits: InfoReply,
        progress: CallProgress,
        batch: _Batch,
    ) -> list[Any]:
        """Return the answer to each row, or the error of a rejected row."""
        start, rows = batch
        if isinstance(rows, Exception):
            raise rows
        if not rows:
            return []
        try:
            parts = spec.call(rows, options, start=start).parts(limits)
            return await self._answer(parts, self._deadline(), progress)
        except (InvalidInputError, BodyTooLargeError) as error:
            index = error.input_index
            if index is None or not start <= index < start + len(rows):
                raise  # the error is not about one of these rows
            # A traceback would keep the rows in memory.
            error.__cause__ = error.__context__ = None
            row_error = error.with_traceback(None)
        answer_rows = partial(self._answer_rows, spec, options, limits, progress)
        answers = await answer_rows((start, rows[: index - start]))
        return [*answers, row_error, *await answer_rows((index + 1, rows[index - start + 1 :]))]

    async def _answer(
        self, parts: list[Call[Any]], deadline: Deadline, progress: CallProgress
    ) -> list[Any]:
        """Return the answers to parts of a list, splitting a part that is too large in halves."""
        answers: list[Any] = []
        while parts:
            part, *parts = parts
            try:
                answers += await self._try(part, deadline, progress)
            except (TooMuchAtOnceError, BodyTooLargeError):
                # Only the service can count the tokens of a list.
                if part.num_items < 2:
                    raise
                parts = part.halves() + parts
        return answers

    async def _try(self, call: Call[ReplyT], deadline: Deadline, progress: CallProgress) -> ReplyT:
        """Send a request, and retry it after a delay while `Retries` allows this."""
        retries = Retries(self._server.num_retries, deadline, progress)
        while True:
            try:
                received = await self._receive(call, deadline)
            except NotReadyError as error:
                await asyncio.sleep(retries.delay_s(error))
                continue
            if received.status not in RETRIED_STATUSES:
                progress.num_answered += 1
                return call.answer(received)
            await asyncio.sleep(retries.delay_s(call.error(received), received.retry_after_s))

    async def _receive(self, call: Call[Any], deadline: Deadline) -> RawReply:
        """Send a request without retries."""
        timeout_s = deadline.remaining_s()
        with deadline.errors():
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(
                    call.method,
                    self._server.base_url + call.path,
                    json=call.body,
                    headers=self._server.headers,
                    timeout=timeout_s,
                ) as response,
            ):
                content = await self._read(response, deadline)
        return RawReply(
            url=str(response.url),
            status=response.status_code,
            headers=response.headers,
            content=content,
        )

    async def _read(self, response: httpx.Response, deadline: Deadline) -> bytes:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > self._server.max_reply_bytes:
                raise RequestError(
                    f"The reply of {response.url} has more than {self._server.max_reply_bytes} "
                    "bytes. Request less (fewer inputs, a smaller top_k), or raise max_reply_bytes."
                )
            deadline.remaining_s()  # raises at the deadline: the sync client has no asyncio.timeout
        return bytes(content)


async def _batches(rows: AnyIterable[Any]) -> AsyncGenerator[_Batch, None]:
    """Yield batches of rows. An error of the iterator comes after the rows."""
    start = 0
    batch: list[Any] = []
    failure: Exception | None = None
    try:
        async with aclosing(async_iterate(rows)) as iterator:
            async for row in iterator:
                batch.append(row)
                if len(batch) == _ROWS_PER_REQUEST:
                    yield start, batch
                    start, batch = start + len(batch), []
    except Exception as error:  # noqa: BLE001  # raised by the stream, after the answers
        failure = error
    yield start, batch
    if failure is not None:
        yield start, failure
