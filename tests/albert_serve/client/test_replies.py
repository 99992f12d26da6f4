"""Replies that a service gives only in need: refusals, retries, and bodies that never end."""

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

from albert_serve.api import schemas
from albert_serve.errors import (
    DeadlineExceededError,
    NotReadyError,
    QueueFullError,
    RequestError,
    UnauthorizedError,
)
from tests.albert_serve.client.twins import Sent, Twin, open_twin
from tests.albert_serve.support import free_port

Replying = Callable[..., tuple[Any, list[httpx.Request]]]


def refusal(status: int, error_type: str, **headers: str) -> httpx.Response:
    body = {"error": "no", "error_type": error_type, "request_id": "r1"}
    return httpx.Response(status, json=body, headers={"Retry-After": "0", **headers})


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
def test_what_passes_is_tried_again(
    failures: list[httpx.Response | Exception], replying: Replying
) -> None:
    client, received = replying(*failures, ORDER)
    assert client.sentence_order(PAIR).in_order == 0.5
    assert len(received) == len(failures) + 1
    assert {request.headers["Authorization"] for request in received} == {"Bearer secret"}


def test_overload_that_lasts_is_an_error_with_the_wait(replying: Replying) -> None:
    client, received = replying(*[refusal(429, "overloaded")] * 3)
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


def test_a_malformed_warnings_header_is_ignored(replying: Replying) -> None:
    for remark in ("{not json", "1", "null"):
        headers = {schemas.WARNINGS_HEADER: remark}
        client, _ = replying(httpx.Response(200, json={"in_order": 0.5}, headers=headers))
        assert client.sentence_order(PAIR).in_order == 0.5


def test_num_retries_of_zero_never_retries(replying: Replying) -> None:
    client, received = replying(refusal(429, "overloaded"), num_retries=0)
    with pytest.raises(QueueFullError):
        client.info()
    assert len(received) == 1
    client, received = replying(httpx.ConnectError(""), num_retries=0)
    with pytest.raises(NotReadyError, match="ConnectError; is the service running"):
        client.info()


@pytest.mark.parametrize(("header", "expected"), [("90", 90.0), ("soon", 1.0)])
def test_retry_after_is_in_seconds(header: str, expected: float, replying: Replying) -> None:
    client, _ = replying(refusal(429, "overloaded", **{"Retry-After": header}), num_retries=0)
    with pytest.raises(QueueFullError) as caught:
        client.info()
    assert caught.value.retry_after_s == expected


ENDLESS_BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n"
GZIP_HEAD, GZIP_NOTHING = bytes.fromhex("1f8b0800000000000003"), bytes.fromhex("000000ffff")


@pytest.mark.parametrize(
    ("beginning", "more", "kind"),
    [
        pytest.param(ENDLESS_BODY + b"\r\n", b" ", "sync", id="body, sync"),
        pytest.param(ENDLESS_BODY + b"\r\n", b" ", "async", id="body"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX-Long: ", b"a", "async", id="headers"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n", "async", id="100 Continue"),
        pytest.param(
            ENDLESS_BODY + b"Content-Encoding: gzip\r\n\r\n" + GZIP_HEAD,
            GZIP_NOTHING,
            "async",
            id="gzip",
        ),
    ],
)
def test_the_timeout_holds_for_a_reply_that_never_ends(
    beginning: bytes, more: bytes, kind: str
) -> None:
    """Each part comes in time, so that no wait for one is too long.

    Threads look at the clock whenever a part of the body comes.
    """
    with (
        dripping(beginning, more) as url,
        contextlib.closing(open_twin(kind, url, timeout_s=0.5)) as client,
    ):
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"within 0.5 s"):
            client.info()
        assert time.monotonic() - began_s < 2


def test_a_service_that_never_replies_times_out(twin: Callable[..., Twin]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineExceededError, match=r"within 0.2 s"):
            twin(url, timeout_s=0.2).info()


def test_an_unreachable_service_is_reported_with_its_address(twin: Callable[..., Twin]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(NotReadyError, match=f"cannot reach {url}.*is the service running"):
        twin(url, num_retries=0).info()


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


def test_a_reply_that_grows_when_it_is_decoded_is_not_read_to_its_end(replying: Replying) -> None:
    bomb = encoded("gzip", gzip.compress(b" " * (16 << 20)))
    client, _ = replying(bomb, max_reply_bytes=4 << 20)
    with pytest.raises(RequestError, match="is over 4194304 bytes"):
        client.info()


def encoded(encoding: str, content: bytes) -> httpx.Response:
    """A response whose content is encoded already."""
    headers = {"Content-Encoding": encoding}
    return httpx.Response(200, headers=headers, stream=Sent(content))


def test_a_reply_in_gzip_is_decoded(replying: Replying) -> None:
    client, _ = replying(encoded("gzip", gzip.compress(b'{"in_order": 0.5}')))
    assert client.sentence_order(PAIR).in_order == 0.5
    client, _ = replying(encoded("gzip", b"no gzip at all"))
    with pytest.raises(RequestError, match="is damaged"):
        client.sentence_order(PAIR)


@pytest.mark.parametrize("answer", [[], [[{"label": "a", "score": 1.0}]] * 2])
def test_one_text_has_one_classification(answer: list[Any], replying: Replying) -> None:
    client, _ = replying(httpx.Response(200, json=answer))
    with pytest.raises(RequestError, match="not an answer of /text-classification"):
        client.text_classification("a")
