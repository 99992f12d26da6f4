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
    PAIR,
    URL,
    AnyClient,
    MakeClient,
    client_with_responses,
    error_response,
    limits,
    mock_http,
)
from tests.albert_serve.support import RunningService

ORDER = httpx.Response(200, json={"in_order": 0.5})


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
        ([httpx.ConnectError("no"), error_response(503, "not_ready", retry_after="3")], [0.2, 3]),
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
    client, _ = client_with_responses(*failures, failures[0])
    with pytest.raises(RequestError):
        client.sentence_order(PAIR)


def test_a_failure_beyond_num_retries_or_the_timeout_is_raised_immediately() -> None:
    for retry_after, num_retries in (("0", 0), ("60", 2)):
        busy = error_response(429, "overloaded", retry_after=retry_after)
        client, _ = client_with_responses(busy, num_retries=num_retries)
        with pytest.raises(QueueFullError, match=r"^no$") as caught:
            client.info()
        assert (caught.value.request_id, caught.value.retry_after_s) == ("r1", float(retry_after))


def test_any_other_reply_is_an_error_with_its_text() -> None:
    one_answer = httpx.Response(200, json=[{"in_order": 0.5}])
    cases: list[tuple[httpx.Response | Exception, type[RequestError], str]] = [
        (error_response(401, "unauthorized"), UnauthorizedError, r"^no$"),
        (httpx.Response(504, text="x" * 201), DeadlineExceededError, r"status 504: 'x{200}'\.$"),
        (httpx.DecodingError("bad"), RequestError, f"^The reply of {URL} is damaged: bad"),
        (one_answer, RequestError, "replied to 2 inputs with 1 answers"),
    ]
    for response, error, message in cases:
        client, _ = client_with_responses(limits(2), response)
        with pytest.raises(error, match=message):
            client.sentence_order([PAIR] * 2)


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


def test_a_decoded_reply_over_the_limit_of_bytes_is_an_error(
    kind: str, make_client: MakeClient
) -> None:
    reply: Any = {"content": gzip.compress(b" " * 2000), "headers": {"Content-Encoding": "gzip"}}
    for max_reply_bytes, message in (
        (1999, r"more than 1999 bytes\. .* max_reply_bytes"),
        (2000, r"is not an answer of /info\. Check that it is"),
    ):
        http = mock_http(kind, lambda _: httpx.Response(200, **reply))
        client = make_client(URL, http_client=http, max_reply_bytes=max_reply_bytes)
        with pytest.raises(RequestError, match=message):
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
    client, received = client_with_responses(*outcomes, *outcomes[:3], *[httpx.Response(200)] * 2)
    client.wait_until_ready(30)
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert client.health() is True
    timeouts = [request.extensions["timeout"]["read"] for request in received[-2:]]
    assert timeouts == [pytest.approx(5, abs=0.1), pytest.approx(30, abs=0.1)]


def test_a_service_that_does_not_start_is_an_error_with_the_last_attempt() -> None:
    outcomes: list[tuple[httpx.Response | Exception, str]] = [
        (STARTING, "the service is starting"),
        (httpx.ConnectError("refused"), f"Cannot reach {URL}.*: refused"),
    ]
    for outcome, reason in outcomes:
        client, _ = client_with_responses(*[outcome] * 9)
        message = f"^{URL} was not ready within 0.5 s. The last attempt: {reason}"
        with pytest.raises(NotReadyError, match=message):
            client.wait_until_ready(0.5)
    with pytest.raises(ConfigError, match=r"timeout_s is 0\. It must be more than 0"):
        client.wait_until_ready(0)


def test_missing_address_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBERT_URL", " http://env/\n")
    monkeypatch.setenv("ALBERT_API_KEY", "from-the-environment\n")
    received = []

    def handle(request: httpx.Request) -> httpx.Response:
        received.append((str(request.url), request.headers.get("Authorization")))
        return httpx.Response(200)

    with httpx.Client(transport=httpx.MockTransport(handle)) as http:
        assert AlbertClient(http_client=http).health()
        assert AlbertClient(URL, api_key="passed", http_client=http).health()
        assert AlbertClient(api_key="", model="a/b", http_client=http).health()
    assert received == [
        ("http://env/health", "Bearer from-the-environment"),
        (f"{URL}/health", "Bearer passed"),
        ("http://env/v1/models/a%2Fb/health", None),
    ]


def test_an_invalid_option_is_an_error_that_hides_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALBERT_URL", " ")
    monkeypatch.setenv("ALBERT_API_KEY", "s3cret\nmore")
    cases: list[tuple[str | None, dict[str, Any], str]] = [
        (None, {}, "^No address is set.* or set ALBERT_URL"),
        (URL, {"api_key": None}, "ALBERT_API_KEY begins or ends with a space"),
        ("localhost:3000", {}, "base_url is 'localhost:3000'. It must begin with http"),
        (URL, {"timeout_s": 0}, r"timeout_s is 0\. It must be more than 0"),
        (URL, {"num_retries": -1}, "num_retries is -1"),
        (URL, {"max_concurrency": 0}, "max_concurrency is 0"),
        (URL, {"max_reply_bytes": 0}, "max_reply_bytes is 0"),
    ]
    for base_url, options, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            AlbertClient(base_url, **{"api_key": "", **options})
        assert "s3cret" not in str(caught.value)
    AlbertClient(URL, api_key="", num_retries=0, max_concurrency=1, max_reply_bytes=1).close()


def test_invalid_proxies_are_an_error_except_for_requests_to_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("all_proxy", "gopher://proxy")
    with pytest.raises(ConfigError, match=r"The proxy variables .*gopher"):
        AlbertClient(URL, api_key="")
    for url in ("http://localhost:3000", "http://127.0.0.2"):
        AlbertClient(url, api_key="").close()
