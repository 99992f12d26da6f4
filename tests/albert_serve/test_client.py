"""The client against the running service, and against replies that it would give only in need."""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, get_overloads, get_type_hints

import httpx
import pytest

from albert_serve import calls, schemas
from albert_serve.client import AlbertClient, AsyncAlbertClient
from albert_serve.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidInputError,
    NoMaskError,
    NotReadyError,
    QueueFullError,
    RequestError,
    TextTooLongError,
    UnauthorizedError,
)
from albert_serve.schemas import Answer, LabelScore, Order, QuestionContext, TextInput, TextPair
from tests.albert_serve.support import MAX_ITEMS, Running

QUESTION = {"question": "Who?", "context": "Marcel Proust was a French novelist."}
URL = "http://service.test"


class AsyncRunner:
    """Calls the asynchronous twin as if it were the other, so that one test serves both."""

    def __init__(self, client: AsyncAlbertClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def run(*args: Any, **options: Any) -> Any:
            return self._loop.run_until_complete(method(*args, **options))

        return run


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module", params=["sync", "async"])
def albert(
    request: pytest.FixtureRequest, service: Running, loop: asyncio.AbstractEventLoop
) -> Iterator[Any]:
    if request.param == "sync":
        with AlbertClient(service.url) as client:
            yield client
    else:
        twin = AsyncAlbertClient(service.url)
        yield AsyncRunner(twin, loop)
        loop.run_until_complete(twin.aclose())


def test_fill_mask(albert: Any) -> None:
    found = albert.fill_mask("The [MASK] was born.", top_k=3)
    assert [type(given) for given in found] == [schemas.FilledToken] * 3
    assert albert.fill_mask(["The [MASK] was born."], top_k=3) == [found]
    assert [len(tokens) for tokens in albert.fill_mask("[MASK] and [MASK]", top_k=2)] == [2, 2]
    [only] = albert.fill_mask("a [MASK]", targets=["▁the"])
    assert only.sequence == "a the"


def test_text_classification(albert: Any) -> None:
    found = albert.text_classification("a film")
    assert [type(given) for given in found] == [LabelScore] * 2
    assert albert.text_classification(["a film", {"text": "a film"}]) == [found, found]
    assert albert.text_classification(TextInput(text="a film"), top_k=1) == found[:1]


def test_question_answering(albert: Any) -> None:
    found = albert.question_answering(QUESTION)
    assert isinstance(found, Answer)
    assert QUESTION["context"][found.start : found.end] == found.answer
    assert albert.question_answering([QuestionContext.model_validate(QUESTION)]) == [found]
    assert albert.question_answering(QUESTION, top_k=2)[0] == found


def test_sentence_order(albert: Any) -> None:
    pair = {"text": "It rained.", "text_pair": "We stayed in."}
    found = albert.sentence_order(pair)
    assert isinstance(found, Order)
    assert albert.sentence_order([TextPair.model_validate(pair)] * 2) == [found, found]


def test_info(albert: Any) -> None:
    info = albert.info()
    assert info.mask_token == "[MASK]"
    assert {task.name for task in info.tasks} >= {"fill-mask", "question-answering"}


def test_what_the_service_refuses_is_its_error_with_the_id(albert: Any) -> None:
    with pytest.raises(NoMaskError, match=r"\[MASK\]") as caught:
        albert.fill_mask("nothing")
    assert caught.value.request_id
    with pytest.raises(TextTooLongError, match="at most 128"):
        albert.text_classification("word " * 300)
    with pytest.raises(InvalidInputError, match="split"):
        albert.fill_mask(["a [MASK]"] * (MAX_ITEMS + 1))


def test_what_the_reply_has_no_room_for_is_logged(
    albert: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "albert_serve.calls"):
        albert.fill_mask("a [MASK]", targets="supervolcanoes")
        albert.text_classification("word " * 300, truncation="truncate")
    assert "its first piece" in caplog.messages[0]
    assert "tokens were cut off" in caplog.messages[1]


def test_a_wrong_option_is_refused_before_sending() -> None:
    with AlbertClient("http://127.0.0.1:1") as client:
        with pytest.raises(InvalidInputError, match="'topk' is not known"):
            client.fill_mask("a [MASK]", topk=3)  # type: ignore[call-overload]
        with pytest.raises(InvalidInputError, match=r"inputs\[1\].context is missing"):
            client.question_answering([QUESTION, {"question": "q"}])


def test_nobody_there_is_told_with_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with (
            AlbertClient(url) as client,
            pytest.raises(NotReadyError, match=f"cannot reach {url}.*is the service running"),
        ):
            client.info()


def test_a_service_that_never_replies_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            AlbertClient(url, timeout_s=0.2) as client,
            pytest.raises(DeadlineExceededError, match=r"within 0.2 s"),
        ):
            client.info()


@pytest.mark.parametrize(
    ("base_url", "timeout_s"), [("localhost:3000", 1.0), (URL, 0.0), (URL, float("nan"))]
)
def test_an_impossible_client_is_refused(base_url: str, timeout_s: float) -> None:
    with pytest.raises(ConfigError):
        AlbertClient(base_url, timeout_s=timeout_s)


def replying(*responses: httpx.Response) -> tuple[Any, list[httpx.Request]]:
    """A client whose service gives these responses in turn, and the requests that it got."""
    seen: list[httpx.Request] = []
    left = list(responses)

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return left.pop(0)

    http = httpx.Client(transport=httpx.MockTransport(handle))
    return AlbertClient(URL, api_key="secret", timeout_s=5.0, http_client=http), seen


def refusal(status: int, error_type: str, **headers: str) -> httpx.Response:
    body = {"error": "no", "error_type": error_type, "request_id": "r1"}
    return httpx.Response(status, json=body, headers=headers)


def test_overload_is_tried_again() -> None:
    order = httpx.Response(200, json={"in_order": 0.5})
    busy = {"Retry-After": "0"}
    client, seen = replying(
        refusal(429, "overloaded", **busy), refusal(503, "not_ready", **busy), order
    )
    assert client.sentence_order({"text": "a", "text_pair": "b"}).in_order == 0.5
    assert len(seen) == 3
    assert {request.headers["Authorization"] for request in seen} == {"Bearer secret"}


def test_overload_that_lasts_is_an_error_with_the_wait() -> None:
    client, seen = replying(*[refusal(429, "overloaded", **{"Retry-After": "0"})] * 3)
    with pytest.raises(QueueFullError) as caught:
        client.info()
    assert len(seen) == 3
    assert (caught.value.request_id, caught.value.retry_after_s) == ("r1", 0.0)


def test_a_wait_past_the_timeout_is_not_begun() -> None:
    client, seen = replying(refusal(429, "overloaded", **{"Retry-After": "60"}))
    with pytest.raises(QueueFullError) as caught:
        client.info()
    assert len(seen) == 1
    assert caught.value.retry_after_s == 60.0


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        pytest.param(refusal(401, "unauthorized"), UnauthorizedError, "^no$", id="envelope"),
        pytest.param(
            httpx.Response(504, text="<html>gateway"),
            DeadlineExceededError,
            "504: '<html>gateway'",
            id="a proxy's error",
        ),
        pytest.param(httpx.Response(500, text=""), RequestError, "replied 500", id="empty error"),
        pytest.param(
            httpx.Response(200, text="<html>"), RequestError, "is it an albert-serve", id="a page"
        ),
        pytest.param(
            httpx.Response(302, headers={"Location": "/login"}),
            RequestError,
            "replied 302",
            id="redirect",
        ),
    ],
)
def test_any_other_reply_is_an_error_that_shows_it(
    response: httpx.Response, error: type[Exception], message: str
) -> None:
    client, seen = replying(response)
    with pytest.raises(error, match=message):
        client.info()
    assert len(seen) == 1


def test_an_empty_classification_is_no_answer() -> None:
    client, _ = replying(httpx.Response(200, json=[]))
    with pytest.raises(RequestError, match="not an answer of /text-classification"):
        client.text_classification("a")


def test_a_broken_remark_does_no_harm() -> None:
    headers = {schemas.WARNINGS_HEADER: "{not json"}
    client, _ = replying(httpx.Response(200, json={"in_order": 0.5}, headers=headers))
    assert client.sentence_order({"text": "a", "text_pair": "b"}).in_order == 0.5


def test_a_given_http_client_stays_open() -> None:
    http = httpx.Client()
    with AlbertClient(URL, http_client=http):
        pass
    assert not http.is_closed
    http.close()


def test_many_threads_share_a_client(service: Running) -> None:
    with AlbertClient(service.url) as client:
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda: found.append(client.fill_mask("a [MASK]")))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Which requests share a batch differs, and with it the last digit.
    assert [[one.token for one in answer] for answer in found] == [
        [one.token for one in found[0]]
    ] * 8


def public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    return {name: one for name, one in vars(kind).items() if not name.startswith("_")}


def test_the_twins_have_the_same_methods_in_the_same_order() -> None:
    sync, asynchronous = public_methods(AlbertClient), public_methods(AsyncAlbertClient)
    assert [name.removeprefix("a") for name in asynchronous] == list(sync)
    assert all(inspect.iscoroutinefunction(one) for one in asynchronous.values())
    for one, twin in zip(sync.values(), asynchronous.values(), strict=True):
        assert inspect.signature(one) == inspect.signature(twin)
        assert one.__doc__ == twin.__doc__
        assert [inspect.signature(given) for given in get_overloads(one)] == [
            inspect.signature(given) for given in get_overloads(twin)
        ]


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        (calls.FillMaskOptions, schemas.FillMaskParameters),
        (calls.TextClassificationOptions, schemas.TextClassificationParameters),
        (calls.QuestionAnsweringOptions, schemas.QuestionAnsweringParameters),
        (calls.SentenceOrderOptions, schemas.SentenceOrderParameters),
    ],
)
def test_the_options_are_the_parameters(options: type, parameters: Any) -> None:
    assert set(get_type_hints(options)) == set(parameters.model_fields)
