"""One interface to both clients, services with scripted replies, and inputs of each method."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
# Maps the numbers of a request's pairs to the status and the body of the reply.
Answer = Callable[[list[int]], tuple[int, Any]]


class AnyClient:
    """The methods of the sync client, or of the async client run on an event loop."""

    def __init__(self, kind: str, *args: Any, **options: Any) -> None:
        self._is_async = kind == "async"
        client_class: Any = AsyncAlbertClient if self._is_async else AlbertClient
        self._client = client_class(*args, **options)
        self._runner = asyncio.Runner()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        if name == "stream":
            return lambda *args, **options: self._iterate(method(*args, **options))
        return lambda *args, **options: self._result(method(*args, **options))

    def with_errors(self, task: str, rows: Any, **options: Any) -> Iterator[Any]:
        """Return the answers of a stream. Rejected rows have errors in place of answers."""
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
            # A stream ends like `with`. The generator of `with_errors` can only be closed.
            ends = ("__aexit__", "aclose") if self._is_async else ("__exit__", "close")
            self._result(next(getattr(answers, end)() for end in ends if hasattr(answers, end)))

    def close(self) -> None:
        self._result(self._client.aclose() if self._is_async else self._client.close())
        self._runner.close()


async def _awaited(result: Any) -> Any:
    return await result


def client_with_responses(
    *responses: httpx.Response | Exception, **options: Any
) -> tuple[AlbertClient, list[httpx.Request]]:
    """Return a client whose service sends these responses in turn, and the list of its requests."""
    received: list[httpx.Request] = []
    remaining_responses = list(responses)

    def handle(request: httpx.Request) -> httpx.Response:
        received.append(request)
        response = remaining_responses.pop(0)
        if isinstance(response, Exception):
            raise response
        # httpx sends each response object only once.
        return httpx.Response(
            response.status_code, headers=response.headers, content=response.content
        )

    http = httpx.Client(transport=httpx.MockTransport(handle))
    # The client sends one request at a time, so request n gets response n.
    options = {"api_key": "secret", "max_concurrency": 1, **options}
    return AlbertClient(URL, http_client=http, **options), received


def mock_http(kind: str, reply: Callable[[httpx.Request], Any]) -> Any:
    """Return a sync or async HTTP client, whose requests a function answers."""
    http_class: Any = httpx.Client if kind == "sync" else httpx.AsyncClient
    return http_class(transport=httpx.MockTransport(reply))


class FakeService:
    """A service that replies with the function of a test, and counts concurrent requests.

    Attributes:
        requests: the numbers of each request's pairs, in the order of arrival.
        num_open: requests that are being answered.
        max_open: the highest value of `num_open` so far.
        num_cancelled: requests whose caller did not wait for the reply.
    """

    def __init__(self, answer: Answer, max_items: int) -> None:
        self.requests: list[list[int]] = []
        self.num_open = self.max_open = self.num_cancelled = 0
        self._answer = answer
        self._max_items = max_items
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(16)

    def http_client(self, kind: str) -> Any:
        """Return an HTTP client of this service. Async requests are answered in other threads."""
        return mock_http(kind, self._reply if kind == "sync" else self._reply_async)

    def wait_for(self, is_true: Callable[[], bool]) -> bool:
        """Wait until a function returns true after a request has arrived. False after 10 s."""
        with self._changed:
            return self._changed.wait_for(is_true, timeout=10)

    def _reply(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/info":
            return limits(self._max_items)
        numbers = [int(pair["text"]) for pair in json.loads(request.content)["inputs"]]
        with self._changed:
            self.requests.append(numbers)
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
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._reply, request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def limits(max_items: int, max_body_bytes: int = 10**6) -> httpx.Response:
    """Return the response of `/info` of a service with these limits."""
    info: dict[str, Any] = {"model_id": "m", "version": "0", "precision": "fp32", "tasks": []}
    info |= {"max_positions": 128, "mask_token": "[MASK]"}
    info |= {"max_items": max_items, "max_body_bytes": max_body_bytes}
    return httpx.Response(200, json=info)


def answer_pairs(numbers: list[int]) -> tuple[int, Any]:
    """Answer each pair with a probability that `numbers_of` converts back to its number."""
    return 200, [{"in_order": number / 2**20} for number in numbers]


def error_response(
    status: int, error_type: str, *, error: str = "no", retry_after: str = "0"
) -> httpx.Response:
    body = {"error": error, "error_type": error_type, "request_id": "r1"}
    return httpx.Response(status, json=body, headers={"Retry-After": retry_after})


def pairs(count: int, length: int = 1) -> list[dict[str, str]]:
    return [{"text": str(number), "text_pair": "b" * length} for number in range(count)]


def numbers_of(answers: list[Any]) -> list[int]:
    return [round(answer.in_order * 2**20) for answer in answers]


MakeClient = Callable[..., AnyClient]
MakeService = Callable[..., tuple[Any, FakeService]]


class Case(NamedTuple):
    """Inputs and options of a client method, and its task.

    Attributes:
        value_type: the type of an answer, or of the values in nested lists of answers.
        implied: options that the method sets itself.
    """

    rows: list[Any]
    value_type: type
    task: str
    options: dict[str, Any] = {}  # noqa: RUF012
    implied: dict[str, Any] = {}  # noqa: RUF012


MASKED = ["The [MASK] was born.", "a [MASK]", "[MASK] and [MASK]"]
TEXTS = ["a film", "It rained.", "word"]
PAIR = {"text": "It rained.", "text_pair": "We stayed in."}
QUESTION = {"question": "Who came?", "context": "Ada came at noon."}
SENTENCES = [["It rained.", "We stayed in."], ["He left.", "She came.", "They met."]]
CASES = {
    "fill_mask": Case(MASKED, FilledToken, "fill-mask", {"top_k": 2}),
    "text_classification": Case(
        [*TEXTS, PAIR, TextInput(text="a film")], LabelScore, "text-classification", {"top_k": 1}
    ),
    "question_answering": Case(
        [QUESTION, QuestionContext.model_validate(QUESTION)], QuestionAnswer, "question-answering"
    ),
    "sentence_order": Case(
        [PAIR, TextPair.model_validate(PAIR)], Order, "sentence-order", {"truncation": True}
    ),
    "coherence": Case(SENTENCES, Coherence, "sentence-order"),
    "token_classification": Case(TEXTS, EntityGroup, "token-classification", {"ignore_labels": []}),
    "feature_extraction": Case(TEXTS, float, "feature-extraction", {"pooling": "cls"}),
    "token_features": Case(
        TEXTS, float, "feature-extraction", {"normalize": True}, implied={"pooling": "none"}
    ),
}


def value_types(value: Any) -> set[type]:
    """Return the types of the values in nested lists."""
    return set().union(*map(value_types, value)) if isinstance(value, list) else {type(value)}


def assert_same(result: Any, expected: Any) -> None:
    """Check that answers are equal, except for the last digits, which depend on the batch."""
    assert type(result) is type(expected)
    if isinstance(expected, BaseModel):
        result, expected = result.model_dump(), expected.model_dump()
    if isinstance(expected, dict):
        result, expected = [*result.items()], [*expected.items()]
    if isinstance(expected, list | tuple):
        for value, expected_value in zip(result, expected, strict=True):
            assert_same(value, expected_value)
    else:
        is_float = isinstance(expected, float)
        assert result == (pytest.approx(expected, abs=1e-5) if is_float else expected)
