"""Replies that a service gives only in need: refusals, retries, and bodies that never end."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from albert_serve.api import schemas
from albert_serve.client import AlbertClient
from albert_serve.errors import (
    DeadlineExceededError,
    NotReadyError,
    QueueFullError,
    RequestError,
    UnauthorizedError,
)
from tests.albert_serve.client.twins import Twin, refusal, replying
from tests.albert_serve.support import free_port

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


@pytest.mark.parametrize("header", ["{not json", "1"])
def test_a_malformed_warnings_header_is_ignored(header: str) -> None:
    headers = {schemas.WARNINGS_HEADER: header}
    client, _ = replying(httpx.Response(200, json={"in_order": 0.5}, headers=headers))
    assert client.sentence_order(PAIR).in_order == 0.5


@pytest.mark.parametrize("answer", [[], [[{"label": "a", "score": 1.0}]] * 2])
def test_one_text_has_one_classification(answer: list[object]) -> None:
    client, _ = replying(httpx.Response(200, json=answer))
    with pytest.raises(RequestError, match="not an answer of /text-classification"):
        client.text_classification("a")


def test_an_unreachable_service_is_reported_with_its_address() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with (
        AlbertClient(url, num_retries=0) as client,
        pytest.raises(NotReadyError, match=f"cannot reach {url}.*is the service running"),
    ):
        client.info()


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
