"""HTTP/1.1 connections with limits on everything except bodies, and without upgrades.

uvicorn has such limits only with h11, a slow parser in Python. BentoML lets uvicorn choose the
parser, so `limit_connections` replaces uvicorn's choice by the protocol below.
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
# Maximum number of bytes around chunks per byte of a body: 1 MB in 1-byte chunks takes seconds.
_FRAMING_FRACTION: Final = 1 / 16
# Maximum number of a body's bytes that are read and ignored after the request was answered.
MAX_IGNORED_BYTES: Final = 1 << 20
_TOO_LARGE: Final = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


def limit_connections() -> None:
    """Use `LimitedHttpProtocol` in all servers that this process starts."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedHttpProtocol.__name__}"


class _LimitExceededError(Exception):
    """An error that a callback raises to stop the parser."""


class _Parser(httptools.HttpRequestParser):
    """A parser that ignores the upgrade header of a request.

    The JDK's HttpClient offers HTTP/2 (`Upgrade: h2c`) in its first requests. A server may ignore
    the offer, but httptools stops after the head and regards the body as another protocol.
    """

    def __init__(self, protocol: LimitedHttpProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3 lacks this method
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
            # This needs a new parser: after `Connection: close`, the old parser stops reading.
            head = self._protocol.head_without_upgrade()
            parser = self._protocol.parser = _Parser(self._protocol)
            super(_Parser, parser).feed_data(head)


class LimitedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 with heads of at most `MAX_HEAD_BYTES` and `MAX_HEADERS`; trailers are dropped.

    Above these limits, the reply is 431 and the connection ends. The framing of a body (sizes and
    extensions of chunks, trailers) may have `MAX_HEAD_BYTES` and a fraction of the body's bytes.
    Above that, the connection ends without a reply. It also ends if a request was answered, such as
    by 401 or 413, and more than a megabyte of its body arrives after the reply.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._is_in_head = True
        self._num_headers = 0
        self._num_head_bytes = 0
        # Number of bytes since the request began, minus its body and the body's allowed framing.
        self._num_framing_bytes = 0.0
        self._num_ignored_bytes = 0
        self._exceeds_limit = False
        self._starts = _starts.setdefault(self.server_state, _Starts(self.loop))
        self._unread = _unread.setdefault(self.server_state, _UnreadReplies(self.loop))

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the connection's timers, which uvicorn keeps after a reset."""
        self._unset_keepalive_if_required()
        self._unread.forget(self.transport)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Limit the time for the client to read the reply."""
        super().pause_writing()
        self._unread.watch(self.transport)

    def resume_writing(self) -> None:
        """Remove the limit, because the client has read nearly all of the reply."""
        super().resume_writing()
        self._unread.forget(self.transport)

    def on_response_complete(self) -> None:
        """End a request, and limit the time to read its reply, even a small one."""
        self._unread.watch(self.transport)
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and end the connection if they exceed a limit."""
        self._num_framing_bytes += len(data)
        super().data_received(data)
        # No callback reports the bytes that the parser keeps, such as an incomplete header.
        if self._num_framing_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._reject()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is malformed or exceeds a limit."""
        if self._exceeds_limit:
            self._reject()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Start a request's head."""
        self._is_in_head = True
        self._num_headers = self._num_head_bytes = self._num_ignored_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Add a part of the request's URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, or drop it if it is a trailer after the body."""
        self._num_headers += 1
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request's body."""
        if self.ignores_upgrade():
            return  # the parser will read the same head again
        self._is_in_head = False
        self._num_headers = self._num_head_bytes = 0
        self._num_framing_bytes = 0.0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add a part of the body, or drop it if its request was answered."""
        self._num_framing_bytes -= (1 + _FRAMING_FRACTION) * len(body)
        super().on_body(body)
        if self.cycle.response_complete:
            self._num_ignored_bytes += len(body)
            if self._num_ignored_bytes > MAX_IGNORED_BYTES:
                self._exceed_limit()

    def on_message_complete(self) -> None:
        """End the request."""
        if self.ignores_upgrade():
            return
        self._num_framing_bytes = 0.0
        super().on_message_complete()

    def ignores_upgrade(self) -> bool:
        """Return whether the request only offers an upgrade, unlike CONNECT, which demands one."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def head_without_upgrade(self) -> bytes:
        """Return the head of the current request without its offer of an upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._starts.add(cycle, partial(super()._start_asgi_task, cycle, app))

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._exceed_limit()

    def _exceed_limit(self) -> None:
        self._exceeds_limit = True
        raise _LimitExceededError

    def _reject(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._is_in_head and not is_answering:
            self.transport.write(_reply())
        self.transport.close()


class _Starts:
    """The waiting requests of an event loop, which starts one in each of its iterations.

    A request takes about ten iterations, and each iteration continues all started requests. If all
    requests started on arrival, clients that disconnect immediately could exhaust the event loop:
    it would work on their requests before it noticed that the connections have ended. A request
    whose client disconnects while it waits here never starts.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[RequestResponseCycle, Callable[[], None]]] = deque()
        self._has_started_one = False

    def add(self, cycle: RequestResponseCycle, start: Callable[[], None]) -> None:
        """Start a request after the waiting requests, or now if this iteration started none."""
        self._waiting.append((cycle, start))
        if not self._has_started_one:
            self._start_next()

    def _start_next(self) -> None:
        self._has_started_one = False
        while self._waiting and not self._has_started_one:
            cycle, start = self._waiting.popleft()
            if not cycle.disconnected:
                start()
                self._has_started_one = True
        if self._has_started_one:
            self._loop.call_soon(self._start_next)


class _UnreadReplies:
    """The connections of a server whose clients have not read a complete reply yet.

    uvicorn writes a reply into the connection's buffer, which has no limit, and closes a
    connection only when its buffer is empty.

    A client has `MAX_UNREAD_S` to read a reply. If all unread replies together exceed
    `MAX_UNREAD_BYTES`, the oldest connections end. A single reply may be larger.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # oldest first

    def watch(self, transport: asyncio.Transport) -> None:
        """End a connection if it still has an unread reply after `MAX_UNREAD_S`."""
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
        """Stop watching a connection, because its client reads or it has ended."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _end(self, transport: asyncio.Transport) -> None:
        self.forget(transport)
        if transport.get_write_buffer_size():
            transport.abort()


# A process may run several servers, as tests do.
_starts: WeakKeyDictionary[ServerState, _Starts] = WeakKeyDictionary()
_unread: WeakKeyDictionary[ServerState, _UnreadReplies] = WeakKeyDictionary()


def _reply() -> bytes:
    request_id = uuid.uuid4().hex
    body = json.dumps(
        {
            "error": (
                f"The request line and headers have more than {MAX_HEAD_BYTES} bytes, or there are "
                f"more than {MAX_HEADERS} headers. Send fewer or shorter headers."
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
