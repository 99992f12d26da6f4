"""Answers by a running service, over HTTP, with bounded concurrency."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self

from pydantic import TypeAdapter

from albert_serve.api.schemas import (
    TRUNCATED_AT_HEADER,
    TRUNCATED_HEADER,
    WARNINGS_HEADER,
    InfoReply,
    TaskRequest,
    TextClassificationRequest,
)
from albert_serve.client.requests import Call
from albert_serve.client.sync_client import AlbertClient
from albert_serve.client.transport import Outcome, Received, Send
from albert_serve.errors import (
    AlbertServeError,
    BodyTooLargeError,
    ConfigError,
    DeadlineExceededError,
    InvalidInputError,
    MalformedRequestError,
    NotReadyError,
    QueueFullError,
    RequestError,
)
from albert_serve.scoring.answers import OUTPUT, Result
from albert_serve.scoring.errors import ChangedJobError, ServiceUnavailableError
from albert_serve.scoring.local import error_result

NUM_CONCURRENT: Final = 8
WAIT_S: Final = 300.0
_CALL_S: Final = 120.0
_MAX_DELAY_S: Final = 10.0
# Of one request, while the service answers others.
_MAX_DEADLINES: Final = 3
# Over soon, unless the service is gone.
_PASSING: Final = (DeadlineExceededError, NotReadyError, QueueFullError)
# Of the row, not of the service.
_OF_ROW: Final = (InvalidInputError, MalformedRequestError, BodyTooLargeError)
_ANY: Final = TypeAdapter[Any](Any)


class _Client(AlbertClient):
    """A client without retries that also returns the headers of a reply."""

    def __init__(self, base_url: str, *, model: str | None, api_key: str | None) -> None:
        super().__init__(base_url, model=model, api_key=api_key, timeout_s=_CALL_S, num_retries=0)
        self._replies = threading.local()

    def answer(self, call: Call[Any]) -> tuple[Any, Mapping[str, str]]:
        """Return the answer to a call, and the reply's headers."""
        answer = self._send(call)
        return answer, self._replies.headers

    def _perform(self, step: Send) -> Outcome:
        outcome = super()._perform(step)
        if isinstance(outcome, Received):
            self._replies.headers = outcome.headers
        return outcome


class RemoteScorer:
    """Answers with a service; for `with`.

    A service that is overloaded is asked again after the delay that it names, and one that is out
    of reach until it answers, or has not answered anything for so long.

    Args:
        url: its address, such as "http://127.0.0.1:3000".
        task: the name of the task.
        model: the name of a hosted model; None for the service's default.
        api_key: sent as a bearer token.
        num_concurrent: the limit of requests at once.
        wait_s: the time limit without any answer.

    Raises:
        ConfigError: an argument is wrong, or the service's model has no such task.
        ServiceUnavailableError: the service does not answer.
        RequestError: it refuses to, as without a key.
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
        self._wait_s = wait_s
        self._answered_s = time.monotonic()
        self._closed = threading.Event()
        self._client = _Client(url, model=model, api_key=api_key)
        self._pool = ThreadPoolExecutor(num_concurrent)
        try:
            self.identity = self._find_task()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the waits and the threads, and close the connections."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def _find_task(self) -> dict[str, str]:
        info = self._info()
        tasks = [entry.name for entry in info.tasks]
        if self.task not in tasks:
            raise ConfigError(f"{self._url} has no {self.task}; it has {', '.join(tasks)}")
        return _identity(info)

    def prepare(self, request: TaskRequest) -> TaskRequest:
        """Return the request, which the service checks."""
        return request

    def cost_bytes(self, work: TaskRequest) -> int:
        """Return 0: it is not known."""
        return 0

    def run(self, works: Sequence[TaskRequest]) -> list[Result]:
        """Send the requests, and return the results in order.

        Raises:
            ServiceUnavailableError: the service does not answer.
            ChangedJobError: it has another model than at the start.
            RequestError: it refuses all requests.
        """
        self._answered_s = time.monotonic()
        results = list(self._pool.map(self._answer, works))
        if works and _identity(self._info()) != self.identity:
            raise ChangedJobError(f"the model of {self._url} was replaced during the job")
        return results

    def _info(self) -> InfoReply:
        info = self._until_answered(self._client.info)
        assert isinstance(info, InfoReply)
        return info

    def _answer(self, request: TaskRequest) -> Result:
        body = request.model_dump(exclude_unset=True)
        call: Call[Any] = Call(
            method="POST", path=f"/{self.task}", body=body, read=_ANY.validate_json
        )
        try:
            answer, headers = self._until_answered(lambda: self._client.answer(call))
        except (*_OF_ROW, DeadlineExceededError) as error:
            return error_result(error)
        except RequestError as error:
            # Without an identifier it is not of the service, but of a proxy.
            if type(error) is not RequestError or error.request_id is None:
                raise
            return error_result(error)  # the engine failed at it
        is_list = isinstance(request.inputs, list)
        if isinstance(request, TextClassificationRequest) and not is_list:
            answer = answer[0]
        return Result(values={OUTPUT: answer, **_notes(headers)})

    def _until_answered(self, ask: Any) -> Any:
        delay_s = 0.5
        began_s = time.monotonic()
        num_deadlines = 0
        while True:
            try:
                answer = ask()
            except _PASSING as error:
                num_deadlines += isinstance(error, DeadlineExceededError)
                if num_deadlines >= _MAX_DEADLINES and self._answered_s > began_s:
                    raise
                waited_s = time.monotonic() - self._answered_s
                if waited_s + delay_s > self._wait_s:
                    raise ServiceUnavailableError(
                        f"{self._url} has not answered for {waited_s:.0f} s: {error}"
                    ) from error
                asked_s = error.retry_after_s if isinstance(error, QueueFullError) else 0.0
                if self._closed.wait(max(delay_s, asked_s)):
                    raise
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            except AlbertServeError:
                self._answered_s = time.monotonic()
                raise
            else:
                self._answered_s = time.monotonic()
                return answer


def _identity(info: InfoReply) -> dict[str, str]:
    return {"revision": info.revision or f"{info.model_id} {info.version}"}


def _notes(headers: Mapping[str, str]) -> dict[str, Any]:
    notes = {
        "warnings": json.loads(headers.get(WARNINGS_HEADER, "[]")),
        "truncated_tokens": int(headers.get(TRUNCATED_HEADER, "0")),
        "truncated_at": json.loads(headers.get(TRUNCATED_AT_HEADER, "{}")),
    }
    return {name: value for name, value in notes.items() if value}
