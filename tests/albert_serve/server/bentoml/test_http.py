"""Request lines, headers and trailers are limited before any application sees the request."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from albert_serve.server.bentoml.http import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    LimitedHttpProtocol,
)

TIMEOUT_S = 20
OK_HEAD = b"POST / HTTP/1.1\r\nHost: here\r\n"


@dataclass
class Echo:
    """An application that replies with the length of the body, and keeps what it saw.

    Attributes:
        pause_s: how long the next request keeps the event loop waiting.
    """

    headers: list[list[tuple[bytes, bytes]]] = field(default_factory=list)
    num_begun: int = 0
    pause_s: float = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.num_begun += 1
        pause_s, self.pause_s = self.pause_s, 0.0
        time.sleep(pause_s)
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes += len(message["body"])
            more = message.get("more_body", False)
        self.headers.append(list(scope["headers"]))
        body = str(num_bytes).encode()
        start = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": start})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def app() -> Echo:
    return Echo()


@pytest.fixture
def address(app: Echo) -> Iterator[tuple[str, int]]:
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=LimitedHttpProtocol, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()
    server.should_exit = True
    thread.join(TIMEOUT_S)
    listening.close()


def exchange(address: tuple[str, int], *parts: bytes) -> bytes:
    """All bytes that come back until the server closes, or 10 s of silence."""
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        received = b""
        try:
            while part := connection.recv(1 << 16):
                received += part
        except ConnectionResetError:
            pass
        return received


CLOSE = b"Connection: close\r\n"


def test_a_request_below_the_limit_is_answered(address: tuple[str, int]) -> None:
    padding = b"X-Padding: " + b"a" * (MAX_HEAD_BYTES - 1000) + b"\r\n"
    body = b"b" * 3_000_000
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    reply = exchange(address, OK_HEAD + CLOSE + padding + length, body)
    assert reply.startswith(b"HTTP/1.1 200"), reply[:200]
    assert reply.endswith(b"3000000")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 2_000_000 + b" HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 2_000_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 500_000 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 2000 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"a" * 2_000_000 + b": b\r\n\r\n",
    ],
    ids=["url", "value", "many", "many small", "name"],
)
def test_a_head_over_the_limit_is_refused(head: bytes, address: tuple[str, int], app: Echo) -> None:
    reply = exchange(address, *[head[i : i + 8192] for i in range(0, len(head), 8192)])
    assert not app.headers
    if reply:  # a client that still sends may see the reset before the reply
        assert reply.startswith(b"HTTP/1.1 431 "), reply[:200]


@pytest.mark.parametrize(("num_bytes", "status"), [(-100, b"200"), (200, b"431")])
def test_the_limit_holds_where_a_body_follows_at_once(
    num_bytes: int, status: bytes, address: tuple[str, int], app: Echo
) -> None:
    others = len(OK_HEAD + CLOSE + b"Content-Length: 10000\r\n")
    padding = b"X: " + b"a" * (MAX_HEAD_BYTES + num_bytes - others) + b"\r\n"
    body = b"b" * 10_000
    request = OK_HEAD + CLOSE + padding + b"Content-Length: 10000\r\n\r\n" + body
    assert exchange(address, request).startswith(b"HTTP/1.1 " + status)
    assert len(app.headers) == (status == b"200")


@pytest.mark.parametrize(
    ("num_headers", "status"), [(MAX_HEADERS, b"200"), (MAX_HEADERS + 1, b"431")]
)
def test_the_number_of_headers_is_limited_where_they_come_at_once(
    num_headers: int, status: bytes, address: tuple[str, int], app: Echo
) -> None:
    num_others = (OK_HEAD + CLOSE).count(b": ")
    head = OK_HEAD + CLOSE + b"a:b\r\n" * (num_headers - num_others) + b"\r\n"
    assert exchange(address, head).startswith(b"HTTP/1.1 " + status)
    assert len(app.headers) == (status == b"200")


def test_a_request_behind_a_refused_head_is_not_begun(address: tuple[str, int], app: Echo) -> None:
    head = OK_HEAD + b"a:b\r\n" * MAX_HEADERS + b"\r\n"
    reply = exchange(address, head + OK_HEAD + CLOSE + b"\r\n")
    assert reply.startswith(b"HTTP/1.1 431 ")
    assert not app.num_begun


def test_a_refusal_has_the_form_of_all_errors(address: tuple[str, int]) -> None:
    head = b"GET / HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD_BYTES + 100)
    reply = exchange(address, head)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    content = json.loads(body)
    assert content["error_type"] == "headers_too_large"
    assert f"X-Request-ID: {content['request_id']}".encode() in head


def test_trailers_are_dropped(address: tuple[str, int], app: Echo) -> None:
    request = (
        OK_HEAD
        + CLOSE
        + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\n\r\n"
    )
    reply = exchange(address, request)
    assert reply.endswith(b"\r\n3")
    assert b"authorization" not in dict(app.headers[0])


def test_endless_trailers_end_the_connection(address: tuple[str, int], app: Echo) -> None:
    start = OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    exchange(address, start, *[b"T: " + b"a" * 8000 + b"\r\n"] * 100)
    assert not app.headers


def test_endless_chunk_extensions_end_the_connection(address: tuple[str, int], app: Echo) -> None:
    start = OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n3;"
    exchange(address, start, *[b"a" * 8000] * 100)
    assert not app.headers


def test_requests_on_one_connection_are_counted_apart(address: tuple[str, int], app: Echo) -> None:
    padding = b"X-Padding: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    body = b"Content-Length: 3\r\n\r\nabc"
    first = (OK_HEAD + padding + body) * 5
    reply = exchange(address, first, OK_HEAD + padding + CLOSE + body)
    assert reply.count(b"HTTP/1.1 200") == 6
    assert len(app.headers) == 6


def chunked(chunk: bytes, num_chunks: int) -> bytes:
    chunks = (b"%x\r\n" % len(chunk) + chunk + b"\r\n") * num_chunks
    return OK_HEAD + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def test_some_small_chunks_and_many_large_ones_are_taken(address: tuple[str, int]) -> None:
    assert exchange(address, chunked(b"a", 10_000)).endswith(b"\r\n10000")
    assert exchange(address, chunked(b"a" * 100, 30_000)).endswith(b"\r\n3000000")


def test_very_many_small_chunks_end_the_connection(address: tuple[str, int], app: Echo) -> None:
    assert b" 200 " not in exchange(address, chunked(b"a", 20_000))
    assert b" 200 " not in exchange(address, chunked(b"a" * 8, 100_000))
    assert not app.headers


def test_very_many_pipelined_requests_end_the_connection(
    address: tuple[str, int], app: Echo
) -> None:
    one = OK_HEAD + b"Content-Length: 0\r\n\r\n"
    few = one * (MAX_PIPELINED - 1) + OK_HEAD + CLOSE + b"Content-Length: 0\r\n\r\n"
    assert exchange(address, few).count(b" 200 OK") == MAX_PIPELINED
    assert exchange(address, one * 50_000).count(b" 200 OK") < MAX_PIPELINED
    assert len(app.headers) < 3 * MAX_PIPELINED


def test_no_request_is_parsed_past_the_limit_of_pipelined_ones(
    address: tuple[str, int], app: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[HttpToolsProtocol] = []
    begin = HttpToolsProtocol.on_message_begin

    def count(protocol: HttpToolsProtocol) -> None:
        begun.append(protocol)
        begin(protocol)

    monkeypatch.setattr(HttpToolsProtocol, "on_message_begin", count)
    exchange(address, b"GET / HTTP/1.1\r\n\r\n" * 1000)
    assert MAX_PIPELINED < len(begun) <= len(app.headers) + MAX_PIPELINED + 1


def test_a_body_of_declared_length_is_parsed_as_it_comes(
    address: tuple[str, int], app: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows it has the small turns of heads again."""
    sizes: list[int] = []
    parse = HttpToolsProtocol.data_received

    def count(protocol: HttpToolsProtocol, data: bytes) -> None:
        sizes.append(len(data))
        parse(protocol, data)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", count)
    body = b"a" * (1 << 22)
    first = OK_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    few = OK_HEAD + CLOSE + b"Content-Length: 3\r\n\r\nabc"
    reply = exchange(address, first + few)
    assert reply.count(b" 200 OK") == 2
    assert reply.endswith(b"\r\n3")
    assert b"\r\n%d" % len(body) in reply
    assert max(sizes) > 1 << 15
    sizes.clear()
    head = OK_HEAD + b"Content-Length: %d\r\n" % len(body)
    exchange(address, head + b"a:b\r\n" * 400_000)
    assert max(sizes) <= 1 << 14


def test_a_request_whose_client_leaves_before_its_turn_is_not_begun(
    address: tuple[str, int], app: Echo
) -> None:
    request = OK_HEAD + b"Content-Length: 0\r\n\r\n"
    others = [socket.create_connection(address, timeout=TIMEOUT_S) for _ in range(16)]
    for other in others:  # the server has accepted it
        other.sendall(request)
        assert other.recv(1 << 10).startswith(b"HTTP/1.1 200")
    begun = app.num_begun
    app.pause_s = 0.5  # the next request keeps the event loop waiting
    with socket.create_connection(address, timeout=TIMEOUT_S) as first:
        first.sendall(request)
        while app.num_begun == begun:
            time.sleep(0.01)
        for other in others:
            other.sendall(request)
            other.close()
        assert first.recv(1 << 10).startswith(b"HTTP/1.1 200")
    assert exchange(address, OK_HEAD + CLOSE + b"Content-Length: 0\r\n\r\n").endswith(b"\r\n0")
    num_left = app.num_begun - begun - 2
    assert num_left <= 2
