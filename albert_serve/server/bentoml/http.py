"""HTTP/1.1 connections: limits on everything besides a body, and requests that offer an upgrade.

uvicorn has such limits with h11 only, which parses in Python. BentoML leaves uvicorn to choose its
parser, so the protocol below is put in the place of uvicorn's choice (`limit_connections`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from weakref import WeakKeyDictionary

import httptools
import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

MAX_HEAD_BYTES: Final = 1 << 16
MAX_HEADERS: Final = 256
MAX_UNREAD_S: Final = 60.0
MAX_UNREAD_BYTES: Final = 1 << 27
# Bytes around chunks, for each byte of a body: at 1-byte chunks a megabyte takes seconds.
_FRAMING_SHARE: Final = 1 / 16
# What is read of a body that nobody waits for any more, because its request was answered.
_MAX_UNWANTED_BYTES: Final = 1 << 20
_TOO_LARGE: Final = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


def limit_connections() -> None:
    """Make the servers that this process starts use `LimitedHttpProtocol`."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedHttpProtocol.__name__}"


class _LimitExceededError(Exception):
    """Raised in a callback of the parser, which it ends."""


class _Parser(httptools.HttpRequestParser):
    """A parser that reads a request with an upgrade header as one without it.

    The JDK's HttpClient offers HTTP/2 (`Upgrade: h2c`) on its first requests. A server may ignore
    that, but httptools stops after the head, and would take the body for another protocol.
    """

    def __init__(self, protocol: LimitedHttpProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3, as in uvicorn
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        """Parse received data."""
        parser, rest = self, memoryview(data)
        while True:
            try:
                super(_Parser, parser).feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.ignores_upgrade():
                    raise
                rest = rest[upgrade.args[0] :]
            # In a fresh parser: after a head that closes the connection, the old one reads no more.
            head = self._protocol.head_without_upgrade()
            parser = self._protocol.parser = _Parser(self._protocol)
            super(_Parser, parser).feed_data(head)


class LimitedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 with at most `MAX_HEAD_BYTES` and `MAX_HEADERS` of head; trailers are dropped.

    Past the limits the reply is 431 and the connection ends. As many bytes of a body, and some for
    each of its kilobytes, may be anything else: sizes and extensions of chunks, trailers. Past
    that the connection ends without a reply. So it does when a request was answered, as by 401 or
    413, and over a megabyte of its body still comes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._is_in_head = True
        self._num_headers = 0
        self._num_head_bytes = 0
        # Bytes received since the request began, minus the share that its body allows.
        self._num_read_bytes = 0.0
        self._num_unwanted_bytes = 0
        self._is_given_up = False
        self._starts = _starts.setdefault(self.server_state, _Starts(self.loop))
        self._unread = _unread.setdefault(self.server_state, _UnreadReplies(self.loop))

    def connection_lost(self, exc: Exception | None) -> None:
        """Free what belongs to the connection; uvicorn leaves the timer after a reset."""
        self._unset_keepalive_if_required()
        self._unread.forget(self.transport)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Limit the time that the client has to read the reply."""
        super().pause_writing()
        self._unread.watch(self.transport)

    def resume_writing(self) -> None:
        """Go on, because the client has read nearly all of the reply."""
        super().resume_writing()
        self._unread.forget(self.transport)

    def on_response_complete(self) -> None:
        """End a request; small replies, too, must be read in time."""
        self._unread.watch(self.transport)
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Parse what came, and end the connection if it is too much."""
        self._num_read_bytes += len(data)
        super().data_received(data)
        # What the parser keeps, as an unfinished header, shows in no callback.
        if self._num_read_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is malformed, or above the limits."""
        if self._is_given_up:
            self._refuse()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Begin a request's head."""
        self._is_in_head = True
        self._num_headers = self._num_head_bytes = self._num_unwanted_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; one that comes after the body is a trailer, which is dropped."""
        self._num_headers += 1
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request's body."""
        if self.ignores_upgrade():
            return  # the parser comes back with the same head
        self._is_in_head = False
        self._num_headers = self._num_head_bytes = 0
        self._num_read_bytes = 0.0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body, or drop it if its request was answered."""
        self._num_read_bytes -= (1 + _FRAMING_SHARE) * len(body)
        super().on_body(body)
        if self.cycle.response_complete:
            self._num_unwanted_bytes += len(body)
            if self._num_unwanted_bytes > _MAX_UNWANTED_BYTES:
                self._give_up()

    def on_message_complete(self) -> None:
        """End the request."""
        if self.ignores_upgrade():
            return
        self._num_read_bytes = 0.0
        super().on_message_complete()

    def ignores_upgrade(self) -> bool:
        """Whether the current request offers an upgrade; CONNECT is not an offer."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def head_without_upgrade(self) -> bytes:
        """Return the head of the current request, which offers no upgrade any more."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._starts.add(cycle, partial(super()._start_asgi_task, cycle, app))

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._give_up()

    def _give_up(self) -> None:
        self._is_given_up = True
        raise _LimitExceededError

    def _refuse(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._is_in_head and not is_answering:
            self.transport.write(_reply())
        self.transport.close()


class _Starts:
    """The requests of an event loop that have not begun: each of its iterations begins one.

    A request takes some ten iterations, and an iteration does the next step of all that have begun.
    If all that arrives began at once, clients that ask and leave would take the event loop: each
    would be worked at before anybody notices that it has gone. One that leaves while it waits here
    never begins.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[RequestResponseCycle, Callable[[], None]]] = deque()
        self._has_begun_one = False

    def add(self, cycle: RequestResponseCycle, begin: Callable[[], None]) -> None:
        """Begin a request when those before it have begun: at once, if none has just now."""
        self._waiting.append((cycle, begin))
        if not self._has_begun_one:
            self._begin_next()

    def _begin_next(self) -> None:
        self._has_begun_one = False
        while self._waiting and not self._has_begun_one:
            cycle, begin = self._waiting.popleft()
            if not cycle.disconnected:
                begin()
                self._has_begun_one = True
        if self._has_begun_one:
            self._loop.call_soon(self._begin_next)


class _UnreadReplies:
    """The connections of a server whose clients have not read all of a reply yet.

    uvicorn writes a reply into the connection's buffer, which has no limit, and closes a
    connection only when its buffer is empty.

    A client has `MAX_UNREAD_S` to read a reply. If all unread replies together exceed
    `MAX_UNREAD_BYTES`, the oldest connections are ended; a single reply may be larger.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # the oldest is first

    def watch(self, transport: asyncio.Transport) -> None:
        """End a connection if it still has an unread reply when the time is over."""
        if transport in self._timers or not transport.get_write_buffer_size():
            return
        self._timers[transport] = self._loop.call_later(MAX_UNREAD_S, self._end, transport)
        sizes = {unread: unread.get_write_buffer_size() for unread in self._timers}
        num_bytes = sum(sizes.values())
        for oldest in list(self._timers)[:-1]:
            if num_bytes <= MAX_UNREAD_BYTES:
                return
            num_bytes -= sizes[oldest]
            self._end(oldest)

    def forget(self, transport: asyncio.Transport) -> None:
        """Stop watching a connection, because its client reads, or because it has ended."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _end(self, transport: asyncio.Transport) -> None:
        self.forget(transport)
        if transport.get_write_buffer_size():
            transport.abort()


# One for each server of this process; tests run several.
_starts: WeakKeyDictionary[ServerState, _Starts] = WeakKeyDictionary()
_unread: WeakKeyDictionary[ServerState, _UnreadReplies] = WeakKeyDictionary()


def _reply() -> bytes:
    request_id = uuid.uuid4().hex
    body = json.dumps(
        {
            "error": (
                f"the request line and headers are over {MAX_HEAD_BYTES} bytes, or there are over "
                f"{MAX_HEADERS} headers"
            ),
            "error_type": "headers_too_large",
            "request_id": request_id,
        }
    )
    head = (
        f"HTTP/1.1 {_TOO_LARGE.value} {_TOO_LARGE.phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"X-Request-ID: {request_id}",
        "Connection: close",
    )
    return ("\r\n".join(head) + "\r\n\r\n" + body).encode()
