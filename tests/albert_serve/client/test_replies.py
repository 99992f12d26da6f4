"""Error replies, retries, endless replies, readiness of a service, and options of a client."""

from __future__ import annotations

import contextlib
import gzip
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from albert_serve.client import AlbertClient
from albert_serve.errors import (
    ConfigError,
    DeadlineExceededError,
    NotFoundError,
    NotReadyError,
    QueueFullError,
    RequestError,
    UnauthorizedError,
)
from tests.albert_serve.client.support import (
    URL,
    AnyClient,
    MakeClient,
    client_with_responses,
    error_response,
)
from tests.albert_serve.support import RunningService

ORDER = httpx.Response(200, json={"in_order": 0.5})
PAIR = {"text": "a", "text_pair": "b"}


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays of a sync client, in place of waiting. Random factors have their mean."""
    delays: list[float] = []
    monkeypatch.setattr(time, "sleep", delays.append)
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)
    return delays


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([httpx.Response(502), httpx.ReadError("reset")], [0.2, 0.4]),
        (
            [httpx.ConnectError("refused"), error_response(503, "not_ready", retry_after="3")],
            [0.2, 3],
        ),
        ([error_response(429, "overloaded", retry_after="3"), httpx.Response(429)], [3, 0.4]),
    ],
)
def test_a_temporary_failure_is_retried_twice_after_a_delay(
    failures: list[httpx.Response | Exception], expected: list[float], delays: list[float]
) -> None:
    client, received = client_with_responses(*failures, ORDER)
    assert client.sentence_order(PAIR).in_order == 0.5
    assert delays == [pytest.approx(1.125 * delay) for delay in expected]
    assert {request.headers["Authorization"] for request in received} == {"Bearer secret"}
    client, received = client_with_responses(*failures, failures[0], ORDER)
    with pytest.raises(RequestError):
        client.sentence_order(PAIR)
    assert len(received) == 3


@pytest.mark.parametrize(("retry_after", "num_retries"), [("0", 0), ("60", 2)])
def test_no_retry_happens_beyond_num_retries_or_the_timeout(
    retry_after: str, num_retries: int
) -> None:
    busy = error_response(429, "overloaded", retry_after=retry_after)
    client, received = client_with_responses(*[busy] * 9, num_retries=num_retries)
    with pytest.raises(QueueFullError) as caught:
        client.info()
    assert len(received) == 1
    assert (caught.value.request_id, caught.value.retry_after_s) == ("r1", float(retry_after))


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (error_response(401, "unauthorized"), UnauthorizedError, "^no$"),
        (httpx.Response(504, text="late"), DeadlineExceededError, r"status 504: 'late'\.$"),
    ],
)
def test_any_other_reply_is_an_error_with_its_text(
    response: httpx.Response, error: type[Exception], message: str
) -> None:
    client, received = client_with_responses(response, response)
    with pytest.raises(error, match=message):
        client.info()
    with pytest.raises(error, match=message):
        client.sentence_order(PAIR)
    assert len(received) == 2


ENDLESS_BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    ("kind", "beginning", "repeated"),
    [
        pytest.param("sync", ENDLESS_BODY, b" ", id="sync-body"),
        pytest.param("async", ENDLESS_BODY, b" ", id="async-body"),
        # A sync client checks the time only after each part of the body.
        pytest.param("async", b"HTTP/1.1 200 OK\r\nX-Long: ", b"a", id="async-headers"),
    ],
)
def test_the_timeout_ends_a_reply_that_never_ends(
    kind: str, beginning: bytes, repeated: bytes
) -> None:
    """Each part arrives in time, so no single read exceeds the timeout."""
    with (
        raw_service(beginning, repeated) as (url, service),
        contextlib.closing(AnyClient(kind, url, timeout_s=0.5)) as client,
    ):
        with pytest.raises(DeadlineExceededError, match=r"within 0.5 s"):
            client.info()
        assert service.is_alive()  # the reply had not ended


@contextlib.contextmanager
def raw_service(beginning: bytes, repeated: bytes = b"") -> Iterator[tuple[str, threading.Thread]]:
    """Send one reply whose end repeats for 20 s. Yields the address and the sending thread."""
    is_closed = threading.Event()

    def send() -> None:
        connection, _ = server.accept()
        ends_s = time.monotonic() + 20
        with connection, contextlib.suppress(OSError):
            connection.sendall(beginning)
            while time.monotonic() < ends_s and not is_closed.wait(0.02):
                connection.sendall(repeated)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", thread
        finally:
            is_closed.set()
            thread.join()


def test_a_reply_over_the_limit_of_bytes_is_an_error() -> None:
    plain = httpx.Response(200, content=b" " * 2000)
    client, _ = client_with_responses(plain, max_reply_bytes=1999)
    with pytest.raises(RequestError, match=r"more than 1999 bytes\. .* max_reply_bytes"):
        client.info()
    client, _ = client_with_responses(plain, max_reply_bytes=2000)
    with pytest.raises(RequestError, match=r"is not an answer of /info\. Check that it is"):
        client.info()


def test_a_reply_in_gzip_is_decoded_only_up_to_the_limit(make_client: MakeClient) -> None:
    content = gzip.compress(b" " * (16 << 20))
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(content)}\r\n\r\n"
    with raw_service(head.encode() + content) as (url, _):
        client = make_client(url, max_reply_bytes=4 << 20)
        with pytest.raises(RequestError, match="has more than 4194304 bytes"):
            client.sentence_order(PAIR)


STARTING = httpx.Response(503, json={"error": "the service is starting", "error_type": "not_ready"})


def test_a_running_service_is_healthy_and_ready(service: RunningService) -> None:
    with AlbertClient(service.url, model="tiny") as client:
        assert client.health() is True
        client.wait_until_ready()
    with AlbertClient(service.url, model="missing") as client:
        for method in (client.health, client.wait_until_ready):
            with pytest.raises(NotFoundError, match="missing"):
                method()


def test_wait_until_ready_tries_again_until_the_service_has_started(delays: list[float]) -> None:
    outcomes: list[httpx.Response | Exception] = [
        *(httpx.ConnectError("refused"), httpx.Response(429), STARTING, httpx.Response(502))
    ]
    for outcome in outcomes:
        client, _ = client_with_responses(outcome)
        assert client.health() is False
    client, received = client_with_responses(
        *outcomes, *outcomes[:3], *[httpx.Response(200)] * 2, timeout_s=9.0
    )
    client.wait_until_ready(30)
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert client.health() is True
    timeouts = [request.extensions["timeout"]["read"] for request in received[-2:]]
    assert timeouts == [pytest.approx(5, abs=0.1), pytest.approx(9, abs=0.1)]


def test_a_service_that_does_not_start_is_an_error_with_the_last_attempt() -> None:
    client, _ = client_with_responses(*[STARTING] * 9)
    message = f"^{URL} was not ready within 0.5 s. The last attempt: the service is starting"
    with pytest.raises(NotReadyError, match=message):
        client.wait_until_ready(0.5)
    with pytest.raises(ConfigError, match=r"timeout_s is 0\. It must be more than 0"):
        client.wait_until_ready(0)


@pytest.mark.parametrize(
    ("base_url", "options", "url", "authorization"),
    [
        (None, {}, "http://env/health", "Bearer from-the-environment"),
        (URL, {"api_key": "passed"}, f"{URL}/health", "Bearer passed"),
        (None, {"api_key": "", "model": "a/b"}, "http://env/v1/models/a%2Fb/health", None),
    ],
)
def test_missing_address_and_key_come_from_the_environment(
    base_url: str | None,
    options: dict[str, Any],
    url: str,
    authorization: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALBERT_URL", " http://env/\n")
    monkeypatch.setenv("ALBERT_API_KEY", "from-the-environment\n")

    def handle(request: httpx.Request) -> httpx.Response:
        assert (str(request.url), request.headers.get("Authorization")) == (url, authorization)
        return httpx.Response(200)

    http = httpx.Client(transport=httpx.MockTransport(handle))
    assert AlbertClient(base_url, http_client=http, **options).health() is True


@pytest.mark.parametrize(
    ("base_url", "options", "message"),
    [
        (None, {}, "^No address is set.* or set ALBERT_URL"),
        (URL, {"api_key": None}, "ALBERT_API_KEY begins or ends with a space"),
        ("localhost:3000", {}, "base_url is 'localhost:3000'. It must begin with http"),
        (URL, {"timeout_s": 0}, r"timeout_s is 0\. It must be more than 0"),
        (URL, {"num_retries": -1}, "num_retries is -1"),
        (URL, {"max_concurrency": 0}, "max_concurrency is 0"),
        (URL, {"max_reply_bytes": 0}, "max_reply_bytes is 0"),
    ],
)
def test_an_invalid_option_is_an_error_that_hides_the_key(
    base_url: str | None, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALBERT_URL", " ")
    monkeypatch.setenv("ALBERT_API_KEY", "s3cret\nmore")
    with pytest.raises(ConfigError, match=message) as caught:
        AlbertClient(base_url, **{"api_key": "", **options})
    assert "s3cret" not in str(caught.value)
    AlbertClient(URL, api_key="", num_retries=0, max_concurrency=1, max_reply_bytes=1).close()
