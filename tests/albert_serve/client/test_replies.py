"""Refusals, retries, endless replies and readiness of a service, and a client's options."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
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
from tests.albert_serve.client.twins import URL, Twin, refusal, replying
from tests.albert_serve.support import Running

ORDER = httpx.Response(200, json={"in_order": 0.5})
PAIR = {"text": "a", "text_pair": "b"}


@pytest.mark.parametrize(
    "failures",
    [
        pytest.param([refusal(429, "overloaded"), refusal(503, "not_ready")], id="refused"),
        pytest.param([httpx.Response(502), httpx.ReadError("reset")], id="a proxy's, broken"),
        pytest.param([httpx.ConnectError("refused")], id="out of reach"),
    ],
)
def test_what_passes_is_tried_again(failures: list[httpx.Response | Exception]) -> None:
    client, received = replying(*failures, ORDER)
    assert client.sentence_order(PAIR).in_order == 0.5
    assert len(received) == len(failures) + 1
    assert {request.headers["Authorization"] for request in received} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("retry_after", "num_retries", "num_requests", "seen"),
    [("0", 2, 3, 0.0), ("0", 0, 1, 0.0), ("60", 2, 1, 60.0), ("soon", 0, 1, 1.0)],
    ids=["to the end", "never", "a wait past the timeout is not begun", "no number"],
)
def test_overload_that_lasts_is_an_error_with_the_wait(
    retry_after: str, num_retries: int, num_requests: int, seen: float
) -> None:
    busy = refusal(429, "overloaded", retry_after=retry_after)
    client, received = replying(*[busy] * 9, num_retries=num_retries)
    with pytest.raises(QueueFullError) as caught:
        client.info()
    assert len(received) == num_requests
    assert (caught.value.request_id, caught.value.retry_after_s) == ("r1", seen)


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
    client, received = replying(response)
    with pytest.raises(error, match=message):
        client.info()
    assert len(received) == 1


ENDLESS_BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    ("beginning", "more", "kinds"),
    [
        pytest.param(b"", b"", ("sync", "async"), id="nothing"),
        pytest.param(ENDLESS_BODY, b" ", ("sync", "async"), id="body"),
        # Threads look at the clock whenever a part of the body comes.
        pytest.param(b"HTTP/1.1 200 OK\r\nX-Long: ", b"a", ("async",), id="headers"),
    ],
)
def test_the_timeout_holds_for_a_reply_that_never_ends(
    beginning: bytes, more: bytes, kinds: tuple[str, ...]
) -> None:
    """Each part comes in time, so that no wait for one is too long."""
    for kind in kinds:
        with (
            raw_service(beginning, more) as (url, service),
            contextlib.closing(Twin(kind, url, timeout_s=0.5)) as client,
        ):
            with pytest.raises(DeadlineExceededError, match=r"within 0.5 s"):
                client.info()
            assert service.is_alive()  # it would have gone on


@contextlib.contextmanager
def raw_service(beginning: bytes, more: bytes = b"") -> Iterator[tuple[str, threading.Thread]]:
    """Serve one reply that goes on, a little at a time, for 20 s: its address and its thread."""
    done = threading.Event()

    def drip() -> None:
        connection, _ = server.accept()
        ends_s = time.monotonic() + 20
        with connection, contextlib.suppress(OSError):
            connection.sendall(beginning)
            while time.monotonic() < ends_s and not done.wait(0.02):
                connection.sendall(more)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", thread
        finally:
            done.set()
            thread.join()


def test_a_large_reply_is_not_read_to_its_end() -> None:
    plain = httpx.Response(200, content=b" " * 2000)
    client, _ = replying(plain, max_reply_bytes=1999)
    with pytest.raises(RequestError, match=r"over 1999 bytes; ask for less .* max_reply_bytes"):
        client.info()
    client, _ = replying(plain, max_reply_bytes=2000)
    with pytest.raises(RequestError, match="not an answer of /info"):
        client.info()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(gzip.compress(b'{"in_order": 0.5}'), None, id="decoded"),
        pytest.param(b"no gzip at all", "is damaged", id="damaged"),
        pytest.param(gzip.compress(b" " * (16 << 20)), "is over 4194304 bytes", id="grows"),
    ],
)
def test_a_reply_in_gzip_is_decoded_up_to_the_limit(
    content: bytes, message: str | None, twin: Callable[..., Twin]
) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(content)}\r\n\r\n"
    with raw_service(head.encode() + content) as (url, _):
        client = twin(url, max_reply_bytes=4 << 20)
        if message is None:
            assert client.sentence_order(PAIR).in_order == 0.5
        else:
            with pytest.raises(RequestError, match=message):
                client.sentence_order(PAIR)


STARTING = httpx.Response(503, json={"error": "the service is starting", "error_type": "not_ready"})


def test_a_running_service_is_healthy_and_ready(service: Running) -> None:
    with AlbertClient(service.url, model="tiny") as client:
        assert client.health() is True
        client.wait_until_ready()
    with AlbertClient(service.url, model="missing") as client:
        for method in (client.health, client.wait_until_ready):
            with pytest.raises(NotFoundError, match="missing"):
                method()


@pytest.mark.parametrize(
    "outcome",
    [
        *(httpx.Response(status) for status in (429, 503)),
        httpx.ConnectError("refused"),
    ],
    ids=str,
)
def test_a_service_that_is_away_or_starting_is_not_healthy(
    outcome: httpx.Response | Exception,
) -> None:
    client, _ = replying(outcome)
    assert client.health() is False


def test_a_service_is_waited_for_until_it_has_started() -> None:
    outcomes: list[httpx.Response | Exception] = [
        *(httpx.ConnectError("refused"), STARTING, httpx.Response(502), httpx.Response(200))
    ]
    client, received = replying(*outcomes)
    client.wait_until_ready(30)
    assert len(received) == len(outcomes)


def test_the_last_attempt_is_in_the_error() -> None:
    client, _ = replying(*[STARTING] * 9)
    message = f"^{URL} was not ready within 0.5 s; the last attempt: the service is starting"
    with pytest.raises(NotReadyError, match=message):
        client.wait_until_ready(0.5)
    with pytest.raises(ConfigError, match="timeout_s is 0; it must be over 0"):
        client.wait_until_ready(0)


@pytest.mark.parametrize(
    ("base_url", "options", "url", "authorization"),
    [
        (None, {}, "http://env/health", "Bearer from-the-environment"),
        (URL, {"api_key": "passed"}, f"{URL}/health", "Bearer passed"),
        (None, {"api_key": "", "model": "a/b"}, "http://env/v1/models/a%2Fb/health", None),
    ],
)
def test_address_and_key_are_those_of_the_environment(
    base_url: str | None,
    options: dict[str, Any],
    url: str,
    authorization: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALBERT_URL", " http://env/\n")
    monkeypatch.setenv("ALBERT_API_KEY", "from-the-environment\n")

    def handle(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == url
        assert request.headers.get("Authorization") == authorization
        return httpx.Response(200)

    with httpx.Client(transport=httpx.MockTransport(handle)) as http:
        assert AlbertClient(base_url, http_client=http, **options).health() is True


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "there is no address; pass base_url, such as .* or set ALBERT_URL"),
        ({"ALBERT_URL": "localhost:3000"}, "ALBERT_URL is 'localhost:3000'; it must begin with"),
        ({"ALBERT_URL": "http://a", "ALBERT_API_KEY": "s3cret\nmore"}, "ALBERT_API_KEY begins"),
    ],
)
def test_a_variable_that_cannot_be_is_refused_by_its_name(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ALBERT_URL", "ALBERT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message) as caught:
        AlbertClient()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("base_url", "options", "message"),
    [
        ("localhost:3000", {}, "must begin with http"),
        ("http://", {}, "and a host"),
        (URL, {"timeout_s": float("nan")}, "timeout_s is nan"),
        (URL, {"num_retries": -1}, "num_retries is -1"),
        (URL, {"max_concurrency": 0}, "max_concurrency is 0"),
        (URL, {"max_reply_bytes": 0}, "max_reply_bytes is 0"),
        (URL, {"api_key": "ключ"}, "is it whole"),
        (URL, {"api_key": "a "}, "begins or ends with a space"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    base_url: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AlbertClient(base_url, **options)
