"""Both clients behind one interface, inputs of each method, and services with scripted replies."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from pydantic import BaseModel

from albert_serve.api.schemas import Answer as QuestionAnswer
from albert_serve.api.schemas import (
    Coherence,
    EntityGroup,
    FilledToken,
    LabelScore,
    Order,
    QuestionContext,
    TextInput,
    TextPair,
)
from albert_serve.client import AlbertClient, AsyncAlbertClient

URL = "http://service.test"
KINDS = ("sync", "async")
# The reply to the numbers of a request's pairs: a status and a body.
Answer = Callable[[list[int]], tuple[int, Any]]


class Twin:
    """The methods of the sync client, or of the asynchronous one on an event loop of its own."""

    def __init__(self, kind: str, *args: Any, **options: Any) -> None:
        self._is_async = kind == "async"
        self._client: Any = (AsyncAlbertClient if self._is_async else AlbertClient)(
            *args, **options
        )
        self._runner = asyncio.Runner()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        if name == "stream":
            return lambda *args, **options: self._iterate(method(*args, **options))
        return lambda *args, **options: self._result(method(*args, **options))

    def with_errors(self, task: str, rows: Any, **options: Any) -> Iterator[Any]:
        """Return the answers of a stream, with errors in place of refused rows' answers."""
        return self._iterate(self._client.stream(task, rows, **options).with_errors())

    def _result(self, result: Any) -> Any:
        return self._runner.run(_awaited(result)) if self._is_async else result

    def _iterate(self, answers: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._result(anext(answers)) if self._is_async else next(answers)
                except (StopIteration, StopAsyncIteration):
                    return
        finally:
            self._result(answers.aclose() if self._is_async else answers.close())

    def close(self) -> None:
        """Close the client and the loop."""
        self._result(self._client.aclose() if self._is_async else self._client.close())
        self._runner.close()


async def _awaited(result: Any) -> Any:
    return await result


def replying(
    *responses: httpx.Response | Exception, **options: Any
) -> tuple[AlbertClient, list[httpx.Request]]:
    """Return the client of a service that gives these responses in turn, and what it is asked."""
    received: list[httpx.Request] = []
    responses_left = list(responses)

    def handle(request: httpx.Request) -> httpx.Response:
        received.append(request)
        response = responses_left.pop(0)
        if isinstance(response, Exception):
            raise response
        # A response can be sent once.
        return httpx.Response(
            response.status_code, headers=response.headers, content=response.content
        )

    http = httpx.Client(transport=httpx.MockTransport(handle))
    # One request at a time, so that the responses' order is that of the requests.
    shared = {"api_key": "secret", "timeout_s": 5.0, "max_concurrency": 1, **options}
    return AlbertClient(URL, http_client=http, **shared), received


class Scripted:
    """A service whose replies a test decides; it knows how many requests it answers at once.

    Attributes:
        sent: the numbers of each request's pairs, in the order of arrival.
        num_open: requests that are being answered.
        max_open: the most that were at the same time.
        num_cancelled: requests whose caller did not wait for the reply.
    """

    def __init__(self, answer: Answer, max_items: int) -> None:
        self.sent: list[list[int]] = []
        self.num_open = self.max_open = self.num_cancelled = 0
        self._answer = answer
        self._max_items = max_items
        self._changed = threading.Condition()

    def http_client(self, kind: str) -> Any:
        """Return a client that is answered by this service: in its own thread, or one beside."""
        if kind == "sync":
            return httpx.Client(transport=httpx.MockTransport(self._reply))
        return httpx.AsyncClient(transport=httpx.MockTransport(self._reply_async))

    def wait_until_open(self, number: int) -> bool:
        """Wait until so many requests are answered at the same time; False if that is never."""
        with self._changed:
            return self._changed.wait_for(lambda: self.max_open >= number, timeout=10)

    def _reply(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/info":
            return httpx.Response(200, json=limits(self._max_items))
        numbers = [int(pair["text"]) for pair in json.loads(request.content)["inputs"]]
        with self._changed:
            self.sent.append(numbers)
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
            self._changed.notify_all()
        try:
            status, body = self._answer(numbers)
            return httpx.Response(status, json=body)
        finally:
            with self._changed:
                self.num_open -= 1

    async def _reply_async(self, request: httpx.Request) -> httpx.Response:
        try:
            return await asyncio.to_thread(self._reply, request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def limits(max_items: int, max_body_bytes: int = 10**6) -> dict[str, Any]:
    """The reply of `/info`."""
    return {
        "model_id": "m",
        "version": "0",
        "precision": "fp32",
        "tasks": [],
        "max_positions": 128,
        "mask_token": "[MASK]",
        "max_items": max_items,
        "max_body_bytes": max_body_bytes,
    }


def orders(numbers: list[int]) -> tuple[int, Any]:
    """The answers to pairs: each has its number."""
    return 200, [{"in_order": number / 2**20} for number in numbers]


def refusal(
    status: int, error_type: str, *, error: str = "no", retry_after: str = "0"
) -> httpx.Response:
    body = {"error": error, "error_type": error_type, "request_id": "r1"}
    return httpx.Response(status, json=body, headers={"Retry-After": retry_after})


def refused(index: int, message: str = "bad") -> tuple[int, Any]:
    """The refusal of one pair of a request."""
    return 422, {"error": f"inputs[{index}]: {message}", "error_type": "invalid_input"}


def pairs(count: int, length: int = 1) -> list[dict[str, str]]:
    return [{"text": str(number), "text_pair": "b" * length} for number in range(count)]


def numbers_of(answers: list[Any]) -> list[int]:
    return [round(answer.in_order * 2**20) for answer in answers]


class Case(NamedTuple):
    """Inputs of a method, the type of its results or of what they are lists of, and its task.

    Attributes:
        implied: the options that the method sets.
    """

    rows: list[Any]
    kind: type
    task: str
    options: dict[str, Any] = {}  # noqa: RUF012
    implied: dict[str, Any] = {}  # noqa: RUF012


MASKED = ["The [MASK] was born.", "a [MASK]", "[MASK] and [MASK]"]
TEXTS = ["a film", "It rained.", "word"]
PAIR = {"text": "It rained.", "text_pair": "We stayed in."}
QUESTION = {"question": "Who came?", "context": "Ada came at noon."}
SENTENCES = [["It rained.", "We stayed in."], ["He left.", "She came.", "They met."]]
CASES = {
    "fill_mask": Case(MASKED, FilledToken, "fill-mask", options={"top_k": 2}),
    "text_classification": Case(
        [*TEXTS, PAIR, TextInput(text="a film")],
        LabelScore,
        "text-classification",
        options={"top_k": 1},
    ),
    "question_answering": Case(
        [QUESTION, QuestionContext.model_validate(QUESTION)], QuestionAnswer, "question-answering"
    ),
    "sentence_order": Case(
        [PAIR, TextPair.model_validate(PAIR)], Order, "sentence-order", options={"truncation": True}
    ),
    "coherence": Case(SENTENCES, Coherence, "sentence-order"),
    "token_classification": Case(
        TEXTS, EntityGroup, "token-classification", options={"ignore_labels": []}
    ),
    "feature_extraction": Case(TEXTS, float, "feature-extraction", options={"pooling": "cls"}),
    "token_features": Case(
        TEXTS,
        float,
        "feature-extraction",
        options={"normalize": True},
        implied={"pooling": "none"},
    ),
}


def kinds(value: Any) -> set[type]:
    """The types of the values of nested lists."""
    return set().union(*map(kinds, value)) if isinstance(value, list) else {type(value)}


def flat(value: Any) -> list[Any]:
    """The numbers and texts of a result; names and lengths are values, too."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return [part for pair in value.items() for each in pair for part in flat(each)]
    if isinstance(value, list):
        return [len(value), *(part for each in value for part in flat(each))]
    return [value]


def assert_same(result: Any, expected: Any) -> None:
    """Compare with a tolerance: the last digits depend on the batch."""
    close = [pytest.approx(one, abs=1e-4) if type(one) is float else one for one in flat(expected)]
    assert flat(result) == close
