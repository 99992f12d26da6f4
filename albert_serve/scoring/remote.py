"""Answers by a running service, over HTTP, with bounded concurrency."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, Self, TypeVar

from pydantic import TypeAdapter

from albert_serve.api.schemas import (
    TRUNCATED_AT_HEADER,
    TRUNCATED_HEADER,
    WARNINGS_HEADER,
    InfoReply,
    TaskInfo,
    TaskRequest,
    TextClassificationRequest,
)
from albert_serve.bundle.manifest import DEFAULT_HEAD
from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.client.async_exchange import AsyncExchange
from albert_serve.client.calls import Call
from albert_serve.client.replies import RawReply, renumbered_places
from albert_serve.client.requests import INFO
from albert_serve.client.retries import TRANSIENT_ERRORS
from albert_serve.client.server import (
    MAX_REPLY_BYTES,
    NUM_RETRIES,
    Server,
    authorization,
    service_url,
)
from albert_serve.errors import (
    AlbertServeError,
    BodyTooLargeError,
    ConfigError,
    DeadlineExceededError,
    InvalidInputError,
    MalformedRequestError,
    RequestError,
)
from albert_serve.scoring.answers import OUTPUT, RowResult
from albert_serve.scoring.errors import ChangedJobError, ServiceUnavailableError
from albert_serve.scoring.options import NUM_CONCURRENT, WAIT_S

_CALL_S: Final = 120.0
# This is the delay before a request that the client gave up is sent again.
_DELAY_S: Final = 0.5
# Timeouts allowed for one request while the service answers others.
_MAX_DEADLINES: Final = 3
# Errors caused by the row, not by the service.
_OF_ROW: Final = (
    InvalidInputError,
    MalformedRequestError,
    BodyTooLargeError,
    DeadlineExceededError,
)
_ANY: Final = TypeAdapter[Any](Any)

_ResultT = TypeVar("_ResultT")


class RemoteScorer:
    """Answers with a service; for `with`.

    If the service is overloaded, a request is retried after the delay that the service names. If
    the service is out of reach, requests are retried until it has not answered for `wait_s`. An
    interrupted job cancels its requests.

    Args:
        url: address of the service, such as "http://127.0.0.1:3000".
        task: the name of the task.
        model: the name of a hosted model; None for the service's default.
        api_key: sent as a bearer token.
        num_concurrent: maximum number of concurrent requests.
        wait_s: maximum time without any answer.

    Raises:
        ConfigError: an argument is wrong, or the service's model has no such task.
        ServiceUnavailableError: the service does not answer.
        RequestError: the service rejects all requests, as without a key.
    """

    def __init__(
        self,
        url: str,
        task: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        num_concurrent: int = NUM_CONCURRENT,
        wait_s: float = WAIT_S,
    ) -> None:
        if num_concurrent < 1:
            raise ConfigError(f"concurrency is {num_concurrent}; it must be 1 or more")
        self.task = task
        self._url = url
        self._num_concurrent = num_concurrent
        self._wait_s = wait_s
        self._answered_s = time.monotonic()
        server = Server(
            base_url=service_url(url, model),
            headers=authorization(api_key),
            timeout_s=_CALL_S,
            num_retries=NUM_RETRIES,
            max_concurrency=1,  # a row's list may need several requests
            max_reply_bytes=MAX_REPLY_BYTES,
        )
        self._exchange = AsyncExchange(server, None)
        # With a factory it leaves the caller's thread without a current event loop.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        try:
            info = self._runner.run(self._info())
            tasks = {entry.name: entry for entry in info.tasks}
            if task not in tasks:
                raise ConfigError(f"{url} has no {task}; it has {', '.join(tasks)}")
        except BaseException:
            self.close()
            raise
        self.identity = _identity(info)
        self.heads: Sequence[str] = _heads(tasks[task])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        with self._runner:
            self._runner.run(self._exchange.aclose())

    def answer(self, parts: Iterable[Sequence[TaskRequest]]) -> Iterator[list[RowResult]]:
        """Yield the results of each part's requests, in order; see `Scorer`.

        Raises:
            ServiceUnavailableError: the service does not answer.
            ChangedJobError: it has another model than at the start.
            RequestError: it refuses all requests.
        """
        for requests in parts:
            yield self._runner.run(self._run(requests))

    async def _run(self, requests: Sequence[TaskRequest]) -> list[RowResult]:
        self._answered_s = time.monotonic()
        slots = asyncio.Semaphore(self._num_concurrent)

        async def answer(request: TaskRequest) -> RowResult:
            async with slots:
                return await self._answer(request)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if requests and _identity(await self._info()) != self.identity:
            raise ChangedJobError(f"the model of {self._url} was replaced during the job")
        return [task.result() for task in tasks]

    async def _info(self) -> InfoReply:
        return await self._until_answered(lambda: self._exchange.send(INFO))

    async def _answer(self, request: TaskRequest) -> RowResult:
        replies: list[tuple[RawReply, int]] = []
        call: Call[Any] = Call(
            method="POST",
            path=f"/{self.task}",
            body=request.model_dump(exclude_unset=True),
            read=_ANY.validate_json,
            on_reply=lambda received, start: replies.append((received, start)),
        )

        async def ask() -> Any:
            replies.clear()
            return await self._exchange.send(call)

        try:
            answer = await self._until_answered(ask)
        except RequestError as error:
            # The engine failed at this row. Without an identifier, the reply is a proxy's.
            is_failure = type(error) is RequestError and error.request_id is not None
            if not (is_failure or isinstance(error, _OF_ROW)):
                raise
            return RowResult.of_error(error)
        if isinstance(request, TextClassificationRequest) and not isinstance(request.inputs, list):
            answer = answer[0]
        return RowResult(values={OUTPUT: answer, **_notes(replies)})

    async def _until_answered(self, ask: Callable[[], Awaitable[_ResultT]]) -> _ResultT:
        """Retry beyond the client's retries, while the service answers other requests."""
        began_s = time.monotonic()
        num_deadlines = 0
        while True:
            try:
                answer = await ask()
            except TRANSIENT_ERRORS as error:
                num_deadlines += isinstance(error, DeadlineExceededError)
                if num_deadlines >= _MAX_DEADLINES and self._answered_s > began_s:
                    raise
                waited_s = time.monotonic() - self._answered_s
                if waited_s + _DELAY_S > self._wait_s:
                    raise ServiceUnavailableError(
                        f"{self._url} has not answered for {waited_s:.0f} s: {error}"
                    ) from error
                await asyncio.sleep(_DELAY_S)
            except AlbertServeError:
                self._answered_s = time.monotonic()
                raise
            else:
                self._answered_s = time.monotonic()
                return answer


def _identity(info: InfoReply) -> dict[str, str]:
    return {"revision": info.revision or f"{info.model_id} {info.version}"}


def _heads(task: TaskInfo) -> list[str]:
    if task.name != CLASSIFICATION:
        return []
    return [head.name for head in task.heads or ()] or [DEFAULT_HEAD]


def _notes(replies: Iterable[tuple[RawReply, int]]) -> dict[str, Any]:
    """Return the notes in the replies to a call, which has one reply for each part of its list."""
    warnings: list[str] = []
    num_truncated = 0
    cuts: dict[str, int] = {}
    for reply, start in sorted(replies, key=itemgetter(1)):
        warnings += json.loads(reply.headers.get(WARNINGS_HEADER, "[]"))
        num_truncated += int(reply.headers.get(TRUNCATED_HEADER, "0"))
        places = reply.headers.get(TRUNCATED_AT_HEADER, "{}")
        cuts |= json.loads(renumbered_places(places, start))
    notes = {
        "warnings": list(dict.fromkeys(warnings)),
        "truncated_tokens": num_truncated,
        "truncated_at": cuts,
    }
    return {name: value for name, value in notes.items() if value}
