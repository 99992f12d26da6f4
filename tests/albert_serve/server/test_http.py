"""The limits of request lines, headers and unread replies, and requests to upgrade."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

from albert_serve.server.bentoml import http
from albert_serve.server.bentoml.http import LimitedHttpProtocol

TIMEOUT_S = 20
OK_HEAD = b"POST / HTTP/1.1\r\nHost: here\r\n"
CLOSE = b"Connection: close\r\n"


@dataclass
class Echo:
    """An application that replies with the length of the body.

    Attributes:
        headers: headers of each request that has begun.
        num_bytes: number of bytes of the last request's body that have arrived.
        reply_bytes: size of the padding of a reply.
        reads_body: whether a body is read before the reply.
    """

    headers: list[list[tuple[bytes, bytes]]] = field(default_factory=list)
    num_bytes: int = 0
    reply_bytes: int = 0
    reads_body: bool = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.headers.append(list(scope["headers"]))
        self.num_bytes, more = 0, self.reads_body
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.num_bytes += len(message["body"])
            more = message.get("more_body", False)
        body = b" " * self.reply_bytes + str(self.num_bytes).encode()
        start = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": start})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def app() -> Echo:
    return Echo()


@pytest.fixture
def address(app: Echo) -> Iterator[tuple[str, int]]:
    """The address of a server of the application."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=LimitedHttpProtocol, log_config=None, lifespan="off", timeout_keep_alive=75
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(TIMEOUT_S)
    listener.close()


def exchange(address: tuple[str, int], *parts: bytes) -> bytes:
    """Send the parts; return all bytes that arrive until the server closes the connection."""
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                connection.sendall(part)
        return read_reply(connection)


def read_reply(connection: socket.socket) -> bytes:
    """Return all bytes until the connection ends."""
    reply = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            reply += part
    return bytes(reply)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_head_without_an_end_is_rejected(address: tuple[str, int], app: Echo) -> None:
    reply = exchange(address, b"GET / HTTP/1.1\r\nX: ", *[b"a" * 8192] * 200)
    assert not app.headers
    if reply:  # if the client is still sending, the connection may be reset before the reply
        assert reply.startswith(b"HTTP/1.1 431 "), reply[:200]


@pytest.mark.parametrize(
    ("num_bytes", "num_headers", "is_accepted"),
    [(65_536, 4, True), (65_537, 4, False), (5000, 256, True), (5000, 257, False)],
)
def test_the_limits_of_a_head_are_exact_if_the_body_follows_immediately(
    num_bytes: int, num_headers: int, is_accepted: bool, address: tuple[str, int], app: Echo
) -> None:
    headers = [b"Host: here", b"Connection: close", b"Content-Length: 10000"]
    headers += [b"a: b"] * (num_headers - 4)
    num_remaining = num_bytes - len(b"/") - sum(len(header) + 2 for header in headers)
    headers.append(b"X: " + b"a" * (num_remaining - len(b"X: \r\n")))
    head = b"\r\n".join([b"POST / HTTP/1.1", *headers, b"", b""])
    reply = exchange(address, head + b"b" * 10_000 + OK_HEAD + CLOSE + b"\r\n")
    reply_head, _, body = reply.partition(b"\r\n\r\n")
    assert len(app.headers) == is_accepted
    if is_accepted:
        assert (reply_head[:13], body) == (b"HTTP/1.1 200 ", b"10000")
        return
    assert reply_head.startswith(b"HTTP/1.1 431 ")
    error = json.loads(body)
    assert error["error_type"] == "headers_too_large"
    assert f"X-Request-ID: {error['request_id']}".encode() in reply_head


def test_other_requests_of_the_connection_and_a_body_do_not_count_as_head(
    address: tuple[str, int], app: Echo
) -> None:
    padding = b"X-Padding: " + b"a" * 32_768 + b"\r\n"
    requests = (OK_HEAD + padding + b"Content-Length: 3\r\n\r\nabc") * 5
    last_head = OK_HEAD + padding + CLOSE + b"Content-Length: 9000000\r\n\r\n"
    reply = exchange(address, requests, last_head, b"b" * 9_000_000)
    assert reply.count(b"HTTP/1.1 200") == len(app.headers) == 6
    assert reply.endswith(b"\r\n\r\n9000000")


@pytest.mark.parametrize(("num_bytes", "is_accepted"), [(13_273, True), (13_274, False)])
def test_the_limit_of_the_framing_of_chunks_is_exact(
    num_bytes: int, is_accepted: bool, address: tuple[str, int], app: Echo
) -> None:
    """A chunk of one byte has 5 bytes of framing, of which a sixteenth of a byte is free."""
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.sendall(OK_HEAD + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n")
        wait_until(lambda: len(app.headers) == 1)
        connection.sendall(b"1\r\nb\r\n" * num_bytes)
        if is_accepted:
            wait_until(lambda: app.num_bytes == num_bytes)
            connection.sendall(b"0\r\n\r\n")
        reply = read_reply(connection)
    assert reply.endswith(b"%d" % num_bytes) == bool(reply) == is_accepted


@pytest.mark.parametrize(("num_bytes", "is_accepted"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_the_limit_of_bytes_after_the_reply_is_exact(
    num_bytes: int, is_accepted: bool, address: tuple[str, int], app: Echo
) -> None:
    app.reads_body = False
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.sendall(OK_HEAD + b"Content-Length: %d\r\n\r\n" % num_bytes)
        reply = connection.recv(1 << 10)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b"b" * num_bytes + OK_HEAD + CLOSE + b"\r\n")
        reply += read_reply(connection)
    assert reply.count(b"HTTP/1.1 200") == len(app.headers) == 1 + is_accepted


UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_a_request_to_upgrade_is_ignored_and_the_body_is_read(
    upgrade: str, address: tuple[str, int], app: Echo
) -> None:
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.sendall(OK_HEAD + UPGRADES[upgrade] + b"Content-Length: 3\r\n\r\nabc")
        assert connection.recv(1 << 10).endswith(b"\r\n\r\n3")
        connection.sendall(OK_HEAD + CLOSE + b"Content-Length: 1\r\n\r\na")
        assert connection.recv(1 << 10).endswith(b"\r\n\r\n1")
    assert len(app.headers) == 2
    assert b"upgrade" not in dict(app.headers[0])


def send_request(address: tuple[str, int]) -> socket.socket:
    """Send a request; return its connection, from which nothing is read yet."""
    connection = socket.create_connection(address, timeout=TIMEOUT_S)
    connection.sendall(OK_HEAD + CLOSE + b"\r\n")
    return connection


def test_a_reply_that_is_not_read_in_time_ends_its_connection(
    address: tuple[str, int], app: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.MAX_UNREAD_S == 60
    monkeypatch.setattr(http, "MAX_UNREAD_S", 1.0)
    app.reply_bytes = 1 << 24
    with send_request(address) as connection:
        assert len(read_reply(connection)) > app.reply_bytes
    with send_request(address) as connection:
        wait_until(lambda: num_connections() == 1)
        wait_until(lambda: num_connections() == 0)
        assert len(read_reply(connection)) < app.reply_bytes


def test_the_oldest_unread_replies_end_if_their_sum_exceeds_the_limit(
    address: tuple[str, int], app: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.MAX_UNREAD_BYTES == 128 << 20
    monkeypatch.setattr(http, "MAX_UNREAD_BYTES", 1 << 25)
    app.reply_bytes = 1 << 24  # some megabytes of it are in the system's buffers
    with contextlib.ExitStack() as stack:
        connections = []
        for number in range(6):
            connections.append(stack.enter_context(send_request(address)))
            wait_until(lambda: len(app.headers) > number)  # noqa: B023
        replies = [read_reply(connection) for connection in connections]
    are_complete = [len(reply) > app.reply_bytes for reply in replies]
    assert are_complete[-1]
    assert 1 <= sum(are_complete) <= 3
    assert are_complete == sorted(are_complete)


def num_connections() -> int:
    gc.collect()
    return sum(type(item) is LimitedHttpProtocol for item in gc.get_objects())
