# Generated from async_exchange.py by scripts/unasync.py; `make client` writes it.
"""The exchange with a service: requests and retries, lists in parts, streams, and readiness."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final, Self, TypeAlias, cast

import httpx
from pydantic import BaseModel

from albert_serve.api.schemas import InfoReply
from albert_serve.client.calls import Call, RawReply, ReplyT
from albert_serve.client.concurrency import in_order, iterate
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

# With so many rows, the fixed cost of a request is small.
_ROWS_PER_REQUEST: Final = 32
_LONGEST_PROBE_S: Final = 5.0
_FIRST_PROBE_DELAY_S: Final = 0.1
_LONGEST_PROBE_DELAY_S: Final = 2.0

# Rows of a stream with the index of the first, or the error of their iterator in place of them.
_Batch: TypeAlias = tuple[int, list[Any] | Exception]


class AnswerStream(Iterator[Any]):
    """The answers to rows, in the order of the rows.

    Rows are read as answers are taken: about 500 ahead, in requests of 32, so that memory
    does not grow with their number. An error of the rows' iterator is raised after the answers to
    the rows before it. After the end of `with`, or `close`, no other request is sent.

    A row that is refused raises its error, and ends the stream; `with_errors` goes on instead. In
    both, `error.input_index` is the row's index. What is no fault of a row always ends the stream:
    a service that is overloaded or out of reach, also after all retries, a wrong key or option.
    """

    def __init__(self, results: Generator[Any, None, None]) -> None:
        self._results = results

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        result = next(self._results)
        if isinstance(result, RequestError):
            self.close()
            raise result
        return result

    def with_errors(self) -> Generator[Any, None, None]:
        """Return the stream with the error of a refused row in place of its answer."""
        return self._results

    def close(self) -> None:
        """End the stream; it yields no more answers."""
        self._results.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Exchange:
    """Sends calls to one service, and caches its limits.

    Args:
        server: the service, and the options of calls.
        http_client: of the caller; None for a new one.
    """

    def __init__(self, server: Server, http_client: httpx.Client | None) -> None:
        self._server = server
        self._http = http_client or server.open_http(httpx.Client)
        self.is_own = http_client is None
        self._limits: InfoReply | None = None

    def close(self) -> None:
        """Close the connections, unless they are of the caller's client."""
        if self.is_own:
            self._http.close()

    def ask(
        self, endpoint: CallSpec[AnswerT], inputs: object, options: Mapping[str, Any]
    ) -> AnswerT | list[AnswerT]:
        """Get the answer to an input, or those to a list; see `send`."""
        answer: AnswerT | list[AnswerT] = self.send(endpoint.call(inputs, options))
        return answer

    def send(self, call: Call[ReplyT]) -> ReplyT:
        """Get the answer to a call; a list is split into parts within the service's limits."""
        deadline, progress = self._deadline(), CallProgress()
        if call.num_items < 2:
            return self._try(call, deadline, progress)
        parts = call.parts(self._fetch_limits(deadline))
        if len(parts) == 1:
            return cast("ReplyT", self._answer(parts, deadline, progress))
        ask = partial(self._answer, deadline=deadline, progress=progress)
        answered = in_order(
            ask,
            iterate([part] for part in parts),
            limit=self._server.max_concurrency,
            max_pending=len(parts),
        )
        answers = [answer for of_part in answered for answer in of_part]
        return cast("ReplyT", answers)  # a list is answered with one

    def stream(
        self, endpoint: CallSpec[Any], rows: Iterable[Any], options: Mapping[str, Any]
    ) -> AnswerStream:
        """Get the answers to rows, in order."""
        if isinstance(rows, str | bytes | Mapping | BaseModel):
            raise InvalidInputError(
                f"rows is of the type {type(rows).__name__}; it must be an iterable of inputs, "
                "such as a list or a generator"
            )
        return AnswerStream(self._stream(endpoint, rows, options))

    def _stream(
        self, endpoint: CallSpec[Any], rows: Iterable[Any], options: Mapping[str, Any]
    ) -> Generator[Any, None, None]:
        limits = self._fetch_limits(self._deadline())
        ask = partial(self._answer_rows, endpoint, options, limits, CallProgress())
        limit = self._server.max_concurrency
        with (
            closing(_batches(rows)) as batches,
            closing(in_order(ask, batches, limit=limit, max_pending=2 * limit)) as answered,
        ):
            for answers in answered:
                yield from answers

    def probe(self, timeout_s: float | None = None) -> RequestError | None:
        """Return why the service does not take requests; None if it does."""
        deadline = Deadline(self._server.base_url, timeout_s or self._server.timeout_s)
        try:
            HEALTH.answer(self._receive(HEALTH, deadline))
        except TRANSIENT_ERRORS as error:
            return error
        return None

    def wait_until_ready(self, timeout_s: float) -> None:
        """Ask for the service's health until it takes requests."""
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s is {timeout_s}; it must be over 0")
        deadline = Deadline(self._server.base_url, timeout_s)
        delay_s = _FIRST_PROBE_DELAY_S
        while error := self.probe(min(_LONGEST_PROBE_S, deadline.left_s())):
            if not deadline.allows(delay_s):
                seen = "no reply in time" if isinstance(error, DeadlineExceededError) else error
                raise NotReadyError(
                    f"{self._server.base_url} was not ready within {timeout_s:g} s; "
                    f"the last attempt: {seen}"
                ) from error
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_PROBE_DELAY_S)

    def _deadline(self) -> Deadline:
        return Deadline(self._server.base_url, self._server.timeout_s)

    def _fetch_limits(self, deadline: Deadline) -> InfoReply:
        if self._limits is None:
            self._limits = self._try(INFO, deadline, CallProgress())
        return self._limits

    def _answer_rows(
        self,
        endpoint: CallSpec[Any],
        options: Mapping[str, Any],
        limits: InfoReply,
        progress: CallProgress,
        batch: _Batch,
    ) -> list[Any]:
        """Get an answer to each row; a row that is refused has its error in place of one."""
        start, rows = batch
        if isinstance(rows, Exception):
            raise rows
        if not rows:
            return []
        try:
            parts = endpoint.call(rows, options, start=start).parts(limits)
            return self._answer(parts, self._deadline(), progress)
        except (InvalidInputError, BodyTooLargeError) as error:
            index = error.input_index
            if index is None or not start <= index < start + len(rows):
                raise  # it is not about one of these rows
            # The traceback would keep the rows in memory.
            error.__cause__ = error.__context__ = None
            refused = error.with_traceback(None)
        ask = partial(self._answer_rows, endpoint, options, limits, progress)
        before = ask((start, rows[: index - start]))
        return [*before, refused, *ask((index + 1, rows[index - start + 1 :]))]

    def _answer(
        self, parts: list[Call[Any]], deadline: Deadline, progress: CallProgress
    ) -> list[Any]:
        """Get the answers to parts of a list in turn, in halves if one is too much at once."""
        answers: list[Any] = []
        while parts:
            part, *parts = parts
            try:
                answers += self._try(part, deadline, progress)
            except (TooMuchAtOnceError, BodyTooLargeError):
                # Only the service can count the tokens of a list.
                if part.num_items < 2:
                    raise
                parts = part.halves() + parts
        return answers

    def _try(self, call: Call[ReplyT], deadline: Deadline, progress: CallProgress) -> ReplyT:
        """Send a request, and again after a delay while a retry is of use."""
        retries = Retries(self._server.num_retries, deadline, progress)
        while True:
            try:
                received = self._receive(call, deadline)
            except NotReadyError as out_of_reach:
                time.sleep(retries.delay_s(out_of_reach))
                continue
            if received.status not in RETRIED_STATUSES:
                progress.num_answered += 1
                return call.answer(received)
            time.sleep(retries.delay_s(call.error(received), received.retry_after_s))

    def _receive(self, call: Call[Any], deadline: Deadline) -> RawReply:
        """Send a request once."""
        timeout_s = deadline.left_s()
        with (
            deadline.errors(),
            self._http.stream(
                call.method,
                self._server.base_url + call.path,
                json=call.body,
                headers=self._server.headers,
                timeout=timeout_s,
            ) as response,
        ):
            content = self._read(response, deadline)
        return RawReply(
            url=str(response.url),
            status=response.status_code,
            headers=response.headers,
            content=content,
        )

    def _read(self, response: httpx.Response, deadline: Deadline) -> bytes:
        content = bytearray()
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > self._server.max_reply_bytes:
                raise RequestError(
                    f"the reply of {response.url} is over {self._server.max_reply_bytes} bytes; "
                    "ask for less at once (fewer inputs, a smaller top_k), or raise max_reply_bytes"
                )
            deadline.left_s()  # a thread looks at the clock here only
        return bytes(content)


def _batches(rows: Iterable[Any]) -> Generator[_Batch, None, None]:
    """Group rows, as many as a request has; an error of theirs comes after them."""
    start = 0
    batch: list[Any] = []
    failure: Exception | None = None
    try:
        with closing(iterate(rows)) as reading:
            for row in reading:
                batch.append(row)
                if len(batch) == _ROWS_PER_REQUEST:
                    yield start, batch
                    start, batch = start + len(batch), []
    except Exception as error:  # noqa: BLE001  # raised by the stream, after the answers
        failure = error
    yield start, batch
    if failure is not None:
        yield start, failure
