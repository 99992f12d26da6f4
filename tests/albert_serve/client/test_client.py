"""The client against the running service, and against replies that it would give only in need."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import inspect
import json
import logging
import re
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, get_overloads, get_type_hints

import httpx
import pytest
from pydantic import BaseModel

from albert_serve.api import schemas, wire
from albert_serve.api.embeddings import FeatureExtractionParameters
from albert_serve.api.schemas import (
    Answer,
    Coherence,
    FilledMasks,
    FilledTarget,
    LabelScore,
    Order,
    QuestionContext,
    TextInput,
    TextPair,
)
from albert_serve.client import AlbertClient, AsyncAlbertClient, requests
from albert_serve.errors import (
    BodyTooLargeError,
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
from tests.albert_serve.support import MAX_BODY_BYTES, MAX_ITEMS, Running

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


def assert_same(result: Sequence[BaseModel], expected: Sequence[BaseModel]) -> None:
    """Compare with a tolerance: the last digits depend on the batch."""
    for one, other in zip(result, expected, strict=True):
        assert type(one) is type(other)
        assert one.model_dump() == pytest.approx(other.model_dump(), abs=1e-5)


def test_fill_mask(albert: Any) -> None:
    result = albert.fill_mask("The [MASK] was born.", top_k=3)
    assert [type(item) for item in result] == [schemas.FilledToken] * 3
    assert_same(albert.fill_mask(["The [MASK] was born."], top_k=3)[0], result)
    assert [len(tokens) for tokens in albert.fill_mask("[MASK] and [MASK]", top_k=2)] == [2, 2]
    [only] = albert.fill_mask("a [MASK]", targets=["▁the"])
    assert only.sequence == "a the"


def test_text_classification(albert: Any) -> None:
    result = albert.text_classification("a film")
    assert [type(item) for item in result] == [LabelScore] * 2
    for again in albert.text_classification(["a film", {"text": "a film"}]):
        assert_same(again, result)
    assert_same(albert.text_classification(TextInput(text="a film"), top_k=1), result[:1])


def test_question_answering(albert: Any) -> None:
    result = albert.question_answering(QUESTION)
    assert isinstance(result, Answer)
    assert QUESTION["context"][result.start : result.end] == result.answer
    assert_same(albert.question_answering([QuestionContext.model_validate(QUESTION)]), [result])
    assert_same(albert.question_answering(QUESTION, top_k=2)[:1], [result])


def test_sentence_order(albert: Any) -> None:
    pair = {"text": "It rained.", "text_pair": "We stayed in."}
    result = albert.sentence_order(pair)
    assert isinstance(result, Order)
    assert_same(albert.sentence_order([TextPair.model_validate(pair)] * 2), [result, result])


def test_coherence(albert: Any) -> None:
    sentences = ["It rained.", "We stayed in.", "We played cards."]
    result = albert.coherence(sentences)
    assert type(result) is Coherence
    assert [(pair.first, pair.second) for pair in result.pairs] == [(0, 1), (1, 2)]
    first, _ = albert.coherence([sentences, sentences[:2]])
    assert first.coherence == pytest.approx(result.coherence, abs=1e-5)


def test_reorder(albert: Any) -> None:
    sentences = ["It rained.", "We stayed in.", "We played cards."]
    result = albert.reorder(sentences)
    assert sorted(result.best_order) == [0, 1, 2]
    assert result.best_coherence >= result.coherence
    assert len(result.pairs) == 6
    [only] = albert.reorder([sentences])
    assert only.best_order == result.best_order


def test_feature_extraction(albert: Any) -> None:
    texts = ["It rained.", "We stayed in, and played cards."]
    first, second = albert.feature_extraction(texts)
    assert len(first) == len(second) == 64
    assert albert.feature_extraction(texts[1]) == pytest.approx(second, abs=1e-5)
    unit = albert.feature_extraction(texts[1], pooling="cls", normalize=True)
    assert sum(number**2 for number in unit) == pytest.approx(1)
    long = albert.feature_extraction("word " * 300, truncate=True, truncation_direction="left")
    assert len(long) == 64


def test_token_features(albert: Any) -> None:
    text = "We stayed in."
    tokens = albert.token_features(text)
    means = [sum(column) / len(tokens) for column in zip(*tokens, strict=True)]
    assert means == pytest.approx(albert.feature_extraction(text), abs=1e-5)
    assert albert.feature_extraction(text, pooling="cls") == pytest.approx(tokens[0], abs=1e-5)
    first, second = albert.token_features([text, "It rained."], normalize=True)
    assert len(first) == len(tokens)
    assert sum(number**2 for number in second[-1]) == pytest.approx(1)


def test_fill_mask_jointly(albert: Any) -> None:
    text = "The [MASK] was [MASK] ."
    result = albert.fill_mask_jointly(text, top_k=3)
    assert [type(item) for item in result] == [FilledMasks] * 3
    assert all(len(item.tokens) == 2 for item in result)
    [again] = albert.fill_mask_jointly([text], top_k=3)
    assert [item.tokens for item in again] == [item.tokens for item in result]


def test_score_targets(albert: Any) -> None:
    targets = ["▁the", "encyclopedic", "of", "in", "was", "born", "he"]
    result = albert.score_targets("a [MASK]", targets)
    assert [type(item) for item in result] == [FilledTarget] * len(targets)
    assert max(len(item.tokens) for item in result) > 1
    [[one]] = albert.score_targets(["a [MASK]"], targets, top_k=1)
    assert one.tokens == result[0].tokens
    first, _ = albert.score_targets("[MASK] a [MASK]", targets)
    assert len(first) == len(targets)


def test_info(albert: Any) -> None:
    info = albert.info()
    assert info.mask_token == "[MASK]"
    assert {task.name for task in info.tasks} >= {"fill-mask", "question-answering"}
    assert (info.card.sizes.num_layers, info.card.sizes.hidden_size) == (3, 64)
    first, *lines = str(info).splitlines()
    assert first == f"{info.model_id}: an ALBERT in fp32, revision {info.revision}"
    assert "  text-classification (negative, positive)" in lines
    assert lines[0].startswith(f"sizes: {info.card.sizes.num_parameters:,} parameters in ")


def test_a_refusal_raises_the_services_error_with_its_id(albert: Any) -> None:
    with pytest.raises(NoMaskError, match=r"\[MASK\]") as caught:
        albert.fill_mask("nothing")
    assert caught.value.request_id
    with pytest.raises(TextTooLongError, match="at most 128"):
        albert.text_classification("word " * 300)


def test_warnings_of_a_reply_are_logged(albert: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "albert_serve.client.transport"):
        albert.fill_mask("a [MASK]", targets="supervolcanoes")
        albert.text_classification("word " * 300, truncation=True)
    assert "its first piece" in caplog.messages[0]
    assert re.search(r'\d+ tokens were cut off \{"inputs": \d+\}$', caplog.messages[1])


def test_a_cut_in_a_part_of_a_list_is_logged_with_the_callers_index(
    albert: Any, caplog: pytest.LogCaptureFixture
) -> None:
    number = MAX_ITEMS + 3
    texts = [*["a film"] * number, "word " * 300]
    with caplog.at_level(logging.WARNING, "albert_serve.client.transport"):
        albert.text_classification(texts, truncation=True)
    [message] = caplog.messages
    assert re.search(rf'tokens were cut off \{{"inputs\[{number}\]": \d+\}}$', message)


def test_a_wrong_option_is_refused_before_sending() -> None:
    with AlbertClient("http://127.0.0.1:1") as client:
        with pytest.raises(InvalidInputError, match="'topk' is not known"):
            client.fill_mask("a [MASK]", topk=3)  # type: ignore[call-overload]
        with pytest.raises(InvalidInputError, match=r"inputs\[1\].context is missing"):
            client.question_answering([QUESTION, {"question": "q"}])


def test_an_unreachable_service_is_reported_with_its_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with (
            AlbertClient(url) as client,
            pytest.raises(NotReadyError, match=f"cannot reach {url}.*is the service running"),
        ):
            client.info()


def test_a_service_that_never_replies_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            AlbertClient(url, timeout_s=0.2) as client,
            pytest.raises(DeadlineExceededError, match=r"within 0.2 s"),
        ):
            client.info()


@pytest.mark.parametrize(
    ("base_url", "options", "message"),
    [
        ("localhost:3000", {}, "must begin with http"),
        ("http://", {}, "and a host"),
        ("http://[::1", {}, "and a host"),
        ("http://a:port", {}, "and a host"),
        (URL, {"timeout_s": 0.0}, "timeout_s is 0.0"),
        (URL, {"timeout_s": float("nan")}, "timeout_s is nan"),
        (URL, {"num_retries": -1}, "num_retries is -1"),
        (URL, {"max_concurrency": 0}, "max_concurrency is 0"),
        (URL, {"max_reply_bytes": 0}, "max_reply_bytes is 0"),
        (URL, {"api_key": "a\nb"}, "is it whole"),
        (URL, {"api_key": "ключ"}, "is it whole"),
        (URL, {"api_key": "a "}, "begins or ends with a space"),
    ],
)
def test_invalid_shared_options_are_refused(
    base_url: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AlbertClient(base_url, **options)


class Sent(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body on its way, for either twin."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        yield self._content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


# Makes a client of a service that gives these responses in turn; and tells the requests it got.
Replying = Callable[..., tuple[Any, list[httpx.Request]]]


@pytest.fixture(params=["sync", "async"])
def replying(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> Replying:
    def make(
        *responses: httpx.Response | Exception, **options: Any
    ) -> tuple[Any, list[httpx.Request]]:
        received: list[httpx.Request] = []
        responses_left = list(responses)

        def handle(request: httpx.Request) -> httpx.Response:
            received.append(request)
            response = responses_left.pop(0)
            if isinstance(response, Exception):
                raise response
            # A response can be sent once.
            headers, sent = dict(response.headers), Sent(response.content)
            return httpx.Response(response.status_code, headers=headers, stream=sent)

        transport = httpx.MockTransport(handle)
        # One request at a time, so that the responses' order is that of the requests.
        shared_options = {"api_key": "secret", "timeout_s": 5.0, "max_concurrency": 1, **options}
        if request.param == "sync":
            return AlbertClient(
                URL, http_client=httpx.Client(transport=transport), **shared_options
            ), received
        twin = AsyncAlbertClient(
            URL, http_client=httpx.AsyncClient(transport=transport), **shared_options
        )
        return AsyncRunner(twin, loop), received

    return make


def refusal(status: int, error_type: str, **headers: str) -> httpx.Response:
    body = {"error": "no", "error_type": error_type, "request_id": "r1"}
    return httpx.Response(status, json=body, headers=headers)


def test_overload_is_tried_again(replying: Replying) -> None:
    order = httpx.Response(200, json={"in_order": 0.5})
    busy = {"Retry-After": "0"}
    client, received = replying(
        refusal(429, "overloaded", **busy), refusal(503, "not_ready", **busy), order
    )
    assert client.sentence_order({"text": "a", "text_pair": "b"}).in_order == 0.5
    assert len(received) == 3
    assert {request.headers["Authorization"] for request in received} == {"Bearer secret"}


def test_overload_that_lasts_is_an_error_with_the_wait(replying: Replying) -> None:
    client, received = replying(*[refusal(429, "overloaded", **{"Retry-After": "0"})] * 3)
    with pytest.raises(QueueFullError) as caught:
        client.info()
    assert len(received) == 3
    assert (caught.value.request_id, caught.value.retry_after_s) == ("r1", 0.0)


def test_a_wait_past_the_timeout_is_not_begun(replying: Replying) -> None:
    client, received = replying(refusal(429, "overloaded", **{"Retry-After": "60"}))
    with pytest.raises(QueueFullError) as caught:
        client.info()
    assert len(received) == 1
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
    response: httpx.Response, error: type[Exception], message: str, replying: Replying
) -> None:
    client, received = replying(response)
    with pytest.raises(error, match=message):
        client.info()
    assert len(received) == 1


def test_an_empty_classification_is_no_answer(replying: Replying) -> None:
    client, _ = replying(httpx.Response(200, json=[]))
    with pytest.raises(RequestError, match="not an answer of /text-classification"):
        client.text_classification("a")


def test_a_malformed_warnings_header_is_ignored(replying: Replying) -> None:
    for remark in ("{not json", "1", "null"):
        headers = {schemas.WARNINGS_HEADER: remark}
        client, _ = replying(httpx.Response(200, json={"in_order": 0.5}, headers=headers))
        assert client.sentence_order({"text": "a", "text_pair": "b"}).in_order == 0.5


def test_a_service_out_of_reach_is_tried_again(replying: Replying) -> None:
    order = httpx.Response(200, json={"in_order": 0.5})
    client, received = replying(httpx.ConnectError("refused"), httpx.ReadError("reset"), order)
    assert client.sentence_order({"text": "a", "text_pair": "b"}).in_order == 0.5
    assert len(received) == 3


def test_num_retries_of_zero_never_retries(replying: Replying) -> None:
    client, received = replying(refusal(429, "overloaded", **{"Retry-After": "0"}), num_retries=0)
    with pytest.raises(QueueFullError):
        client.info()
    assert len(received) == 1
    client, received = replying(httpx.ConnectError(""), num_retries=0)
    with pytest.raises(NotReadyError, match="ConnectError; is the service running"):
        client.info()


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        pytest.param("Fri, 31 Dec 1999 23:59:59 GMT", 0.0, id="a date that has passed"),
        pytest.param("90", 90.0, id="seconds"),
        pytest.param("soon", 1.0, id="nonsense"),
        pytest.param("Fri, 31 Dec 1999 23:59:59", 1.0, id="no time zone"),
        pytest.param("9" * 500, float("inf"), id="never"),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str, expected: float, replying: Replying) -> None:
    client, _ = replying(refusal(429, "overloaded", **{"Retry-After": header}), num_retries=0)
    with pytest.raises(QueueFullError) as caught:
        client.info()
    assert caught.value.retry_after_s == expected


def test_a_date_in_the_future_is_waited_for(replying: Replying) -> None:
    until = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    client, received = replying(refusal(503, "not_ready", **{"Retry-After": until}))
    with pytest.raises(NotReadyError):  # past the timeout, so it is not begun
        client.info()
    assert len(received) == 1


ENDLESS_BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n"
# The beginning of a gzip file, and a block of it that holds nothing.
GZIP_HEAD, GZIP_NOTHING = bytes.fromhex("1f8b0800000000000003"), bytes.fromhex("000000ffff")


@pytest.mark.parametrize("twin", ["sync", "async"])
@pytest.mark.parametrize(
    ("beginning", "more"),
    [
        pytest.param(ENDLESS_BODY + b"\r\n", b" ", id="body"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX-Long: ", b"a", id="headers"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n", id="100 Continue"),
        pytest.param(
            ENDLESS_BODY + b"Content-Encoding: gzip\r\n\r\n" + GZIP_HEAD, GZIP_NOTHING, id="gzip"
        ),
    ],
)
def test_the_timeout_holds_for_a_reply_that_never_ends(
    beginning: bytes, more: bytes, twin: str, loop: asyncio.AbstractEventLoop
) -> None:
    """Each part comes in time, so that no wait for one is too long."""
    with dripping(beginning, more) as url:
        client: Any = AlbertClient(url, timeout_s=0.5)
        if twin == "async":
            client = AsyncRunner(AsyncAlbertClient(url, timeout_s=0.5), loop)
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"within 0.5 s"):
            client.info()
        assert time.monotonic() - began_s < 2
        getattr(client, "close" if twin == "sync" else "aclose")()


def test_the_timeout_holds_with_an_http_client_of_the_callers() -> None:
    with dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n") as url, httpx.Client() as http:
        client = AlbertClient(url, timeout_s=0.5, http_client=http)
        with pytest.raises(DeadlineExceededError):
            client.info()


@contextlib.contextmanager
def dripping(beginning: bytes, more: bytes) -> Iterator[str]:
    """Serve one reply that goes on, a little at a time, for ten seconds."""
    done = threading.Event()

    def drip() -> None:
        connection, _ = server.accept()
        ends_s = time.monotonic() + 10
        with connection, contextlib.suppress(OSError):
            connection.sendall(beginning)
            while time.monotonic() < ends_s and not done.wait(0.02):
                connection.sendall(more)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


def test_a_large_reply_is_not_read_to_its_end(replying: Replying) -> None:
    plain = httpx.Response(200, content=b" " * 2000)
    client, _ = replying(plain, max_reply_bytes=1999)
    with pytest.raises(RequestError, match=r"over 1999 bytes; ask for less .* max_reply_bytes"):
        client.info()
    client, _ = replying(plain, max_reply_bytes=2000)
    with pytest.raises(RequestError, match="not an answer of /info"):
        client.info()


def test_a_reply_that_grows_when_it_is_decoded_is_bounded(replying: Replying) -> None:
    bomb = httpx.Response(200, headers={"Content-Encoding": "gzip"})
    compressor = zlib.compressobj(9, wbits=31)
    block = b" " * (1 << 20)
    bomb._content = b"".join(compressor.compress(block) for _ in range(128)) + compressor.flush()
    client, _ = replying(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="is over 67108864 bytes"):
            client.info()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * (64 << 20)


def test_a_reply_in_gzip_is_decoded_and_in_anything_else_refused(replying: Replying) -> None:
    def encoded(encoding: str, content: bytes) -> httpx.Response:
        made = httpx.Response(200, headers={"Content-Encoding": encoding})
        made._content = content
        return made

    pair = {"text": "a", "text_pair": "b"}
    client, received = replying(encoded("gzip", gzip.compress(b'{"in_order": 0.5}')))
    assert client.sentence_order(pair).in_order == 0.5
    assert received[0].headers["Accept-Encoding"] == "gzip"
    client, _ = replying(encoded("br", b"anything"))
    with pytest.raises(RequestError, match="in the encoding 'br'; only gzip"):
        client.sentence_order(pair)
    client, _ = replying(encoded("gzip", b"no gzip at all"))
    with pytest.raises(RequestError, match="is damaged"):
        client.sentence_order(pair)


def test_a_transport_may_give_replies_whole() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        encoded = gzip.compress(b'{"in_order": 0.5}')
        return httpx.Response(200, content=encoded, headers={"Content-Encoding": "gzip"})

    with httpx.Client(transport=httpx.MockTransport(handle)) as http:
        client = AlbertClient(URL, http_client=http)
        assert client.sentence_order({"text": "a", "text_pair": "b"}).in_order == 0.5


@pytest.mark.parametrize("num_answers", [0, 1, 9])
def test_inputs_and_answers_are_as_many(num_answers: int, replying: Replying) -> None:
    answers = orders(*[0.5] * num_answers)
    client, _ = replying(limits(100), answers)
    with pytest.raises(RequestError, match=f"to 3 inputs with {num_answers} answers"):
        client.sentence_order(pairs(3))
    if num_answers != 1:
        client, _ = replying(answers)
        with pytest.raises(RequestError, match=f"to 1 inputs with {num_answers} answers"):
            client.sentence_order(pairs(1))


def test_one_text_has_one_classification(replying: Replying) -> None:
    client, _ = replying(httpx.Response(200, json=[[{"label": "a", "score": 1.0}]] * 2))
    with pytest.raises(RequestError, match="not an answer of /text-classification"):
        client.text_classification("a")


def limits(max_items: int, max_body_bytes: int = 10**6) -> httpx.Response:
    body = {
        "model_id": "m",
        "version": "0",
        "precision": "fp32",
        "tasks": [],
        "max_positions": 128,
        "mask_token": "[MASK]",
        "max_items": max_items,
        "max_body_bytes": max_body_bytes,
    }
    return httpx.Response(200, json=body)


def orders(*shares: float) -> httpx.Response:
    return httpx.Response(200, json=[{"in_order": share} for share in shares])


def pairs(num_pairs: int, length: int = 1) -> list[dict[str, str]]:
    return [{"text": str(number), "text_pair": "b" * length} for number in range(num_pairs)]


def sent(request: httpx.Request) -> list[int]:
    """The numbers of the `pairs` in a request."""
    return [int(item["text"]) for item in json.loads(request.content)["inputs"]]


def shares(result: list[Order]) -> list[float]:
    return [one.in_order for one in result]


def test_a_long_list_goes_in_parts_that_the_service_takes(replying: Replying) -> None:
    client, received = replying(
        limits(2), orders(0, 0.1), orders(0.2, 0.3), orders(0.4), orders(1, 1)
    )
    assert shares(client.sentence_order(pairs(5))) == [0, 0.1, 0.2, 0.3, 0.4]
    assert [request.url.path for request in received] == ["/info", *["/sentence-order"] * 3]
    assert [sent(request) for request in received[1:]] == [[0, 1], [2, 3], [4]]
    client.sentence_order(pairs(2))
    assert len(received) == 5  # the limits are known now


def test_parts_keep_to_the_limit_of_bytes(replying: Replying) -> None:
    client, received = replying(limits(100, 300), orders(0, 0), orders(0, 0), orders(0))
    client.sentence_order(pairs(5, length=80), truncation=True)
    assert [sent(request) for request in received[1:]] == [[0, 1], [2, 3], [4]]
    assert all(len(request.content) <= 300 for request in received[1:])


def test_an_item_over_the_limit_of_bytes_goes_alone(replying: Replying) -> None:
    client, received = replying(limits(100, 50), orders(0), refusal(413, "body_too_large"))
    with pytest.raises(BodyTooLargeError, match=r"^inputs\[1\]: "):
        client.sentence_order(pairs(2, length=80))
    assert [sent(request) for request in received[1:]] == [[0], [1]]


def test_a_list_that_is_too_much_at_once_is_halved(replying: Replying) -> None:
    too_much = refusal(422, "too_much_at_once")
    client, received = replying(
        limits(100), too_much, too_much, orders(0.1), orders(0.2), orders(0.3, 0.4)
    )
    assert shares(client.sentence_order(pairs(4))) == [0.1, 0.2, 0.3, 0.4]
    assert [sent(request) for request in received[1:]] == [[0, 1, 2, 3], [0, 1], [0], [1], [2, 3]]


def test_one_item_that_is_too_much_is_an_error(replying: Replying) -> None:
    client, _ = replying(limits(100), *[refusal(422, "too_much_at_once")] * 2)
    with pytest.raises(InvalidInputError, match=r"^inputs\[0\]: no$"):
        client.sentence_order(pairs(2))


def test_an_item_that_is_refused_has_its_number_in_the_whole_list(replying: Replying) -> None:
    refused = httpx.Response(
        422, json={"error": "inputs[1]: bad", "error_type": "no_mask", "request_id": "r7"}
    )
    client, _ = replying(limits(2), orders(0, 0), refused)
    with pytest.raises(NoMaskError, match=r"^inputs\[3\]: bad$") as caught:
        client.sentence_order(pairs(4))
    assert caught.value.request_id == "r7"


def test_a_list_may_be_longer_than_any_request(replying: Replying) -> None:
    most = wire.MAX_ITEMS
    responses = [limits(most, 1 << 30), orders(*[0] * most), orders(1, 1)]
    client, received = replying(*responses, timeout_s=60.0)
    result = client.sentence_order(pairs(most + 2))
    assert shares(result) == [0] * most + [1, 1]
    assert [len(sent(request)) for request in received[1:]] == [most, 2]
    with pytest.raises(InvalidInputError, match=rf"^inputs\[{most + 1}\]\.text_pair"):
        client.sentence_order([*pairs(most + 1), {"text": "a"}])


def test_a_service_that_does_not_tell_its_limits_gets_the_whole_list(replying: Replying) -> None:
    client, received = replying(httpx.Response(404), orders(0, 0, 0))
    assert len(client.sentence_order(pairs(3))) == 3
    assert sent(received[1]) == [0, 1, 2]


def test_a_short_list_needs_no_limits(replying: Replying) -> None:
    client, received = replying(orders(0.5), httpx.Response(200, json=[]))
    assert shares(client.sentence_order(pairs(1))) == [0.5]
    assert [request.url.path for request in received] == ["/sentence-order"]
    with pytest.raises(InvalidInputError, match="must hold at least one item"):
        client.sentence_order([])


def test_long_lists_against_the_running_service(albert: Any) -> None:
    texts = [f"The {'e ' * (number % 40)}[MASK] was born." for number in range(2 * MAX_ITEMS + 3)]
    result = albert.fill_mask(texts, top_k=1)
    assert len(result) == len(texts)
    for number in (0, MAX_ITEMS - 1, MAX_ITEMS, 2 * MAX_ITEMS + 2):
        [alone] = albert.fill_mask(texts[number], top_k=1)
        assert result[number][0].token == alone.token
    texts[MAX_ITEMS + 2] = "nothing"
    with pytest.raises(NoMaskError, match=rf"^inputs\[{MAX_ITEMS + 2}\]: the text has no"):
        albert.fill_mask(texts)
    large = ["word " * (MAX_BODY_BYTES // 50)] * 12
    assert len(albert.text_classification(large, truncation=True)) == 12


def test_the_callers_http_client_stays_open() -> None:
    http = httpx.Client()
    with AlbertClient(URL, http_client=http):
        pass
    assert not http.is_closed
    http.close()


def test_many_threads_share_a_client(service: Running) -> None:
    with AlbertClient(service.url) as client:
        result: list[Any] = []
        threads = [
            threading.Thread(target=lambda: result.append(client.fill_mask("a [MASK]")))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Which requests share a batch differs, and with it the last digit.
    assert [[one.token for one in answer] for answer in result] == [
        [one.token for one in result[0]]
    ] * 8


def public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    return {
        name: one
        for base in kind.__mro__
        for name, one in vars(base).items()
        if not name.startswith("_") and inspect.isfunction(one)
    }


def test_the_twins_have_the_same_methods_in_the_same_order() -> None:
    sync, asynchronous = public_methods(AlbertClient), public_methods(AsyncAlbertClient)
    assert [name.removeprefix("a") for name in asynchronous] == list(sync)
    for name, one, twin in zip(sync, sync.values(), asynchronous.values(), strict=True):
        assert one.__doc__ == twin.__doc__
        if name.endswith("_stream"):
            assert list(inspect.signature(one).parameters) == [*inspect.signature(twin).parameters]
            continue
        assert inspect.iscoroutinefunction(twin)
        assert inspect.signature(one) == inspect.signature(twin)
        assert [inspect.signature(item) for item in get_overloads(one)] == [
            inspect.signature(item) for item in get_overloads(twin)
        ]


def test_each_method_that_takes_inputs_has_a_stream_with_its_options() -> None:
    methods = public_methods(AlbertClient)
    others = {"close", "info", "health", "wait_until_ready"}
    answering = {name for name in methods if not name.endswith("_stream")} - others
    assert {f"{name}_stream" for name in answering} == set(methods) - answering - others
    for name in answering:
        _, _, *options = inspect.signature(methods[name]).parameters.values()
        _, rows, *streamed = inspect.signature(methods[f"{name}_stream"]).parameters.values()
        assert rows.name == "rows"
        assert streamed == options


@pytest.mark.parametrize(
    ("options", "parameters", "implied"),
    [
        (requests.FillMaskOptions, schemas.FillMaskParameters, {"joint", "multi_token_targets"}),
        (
            requests.ScoreTargetsOptions,
            schemas.FillMaskParameters,
            {"joint", "multi_token_targets", "targets"},
        ),
        (requests.TextClassificationOptions, schemas.TextClassificationParameters, set()),
        (requests.QuestionAnsweringOptions, schemas.QuestionAnsweringParameters, set()),
        (requests.SentenceOrderOptions, schemas.SentenceOrderParameters, {"reorder"}),
        (requests.FeatureExtractionOptions, FeatureExtractionParameters, set()),
        (requests.TokenFeaturesOptions, FeatureExtractionParameters, {"pooling"}),
    ],
)
def test_the_options_are_the_parameters_that_the_method_leaves_open(
    options: type, parameters: Any, implied: set[str]
) -> None:
    assert set(get_type_hints(options)) == set(parameters.model_fields) - implied
