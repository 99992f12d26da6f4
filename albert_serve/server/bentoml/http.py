"""Limits on what a request may send besides its body: the request line, headers and trailers.

uvicorn has such limits with h11 only, which parses in Python. BentoML leaves uvicorn to choose its
parser, so the protocol below is put in the place of uvicorn's choice (`limit_connections`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from http import HTTPStatus
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import uvicorn
import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from albert_serve.server.bentoml.turns import Turns
from albert_serve.server.logging import RepeatedWarning

MAX_HEAD_BYTES: Final = 1 << 16
MAX_HEADERS: Final = 256
# Requests that were sent before the replies to those before them.
MAX_PIPELINED: Final = 32
# Bytes around chunks, for each byte of a body: at 1-byte chunks a megabyte takes seconds.
_FRAMING_SHARE: Final = 1 / 16
# What is parsed of a connection before it is the others' turn: less if that was many small parts
# (headers, chunks, requests), of which each takes microseconds.
_TURN_BYTES: Final = (1 << 11, 1 << 14)
_MANY_PARTS: Final = 100
# What is read of a connection that waits for its turn: while it is read, its end is noticed.
_MAX_UNPARSED_BYTES: Final = 1 << 18
_TOO_LARGE: Final = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
# The turns of each server of this process.
_turns: WeakKeyDictionary[ServerState, Turns] = WeakKeyDictionary()
_closed = RepeatedWarning(
    logging.getLogger(__name__), "%d connections closed: too many headers, or pipelined requests"
)


def limit_connections() -> None:
    """Make the servers that this process starts use `LimitedHttpProtocol`."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedHttpProtocol.__name__}"


class LimitedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 with at most `MAX_HEAD_BYTES` and `MAX_HEADERS` of head; trailers are dropped.

    Past the limits the reply is 431 and the connection ends. As many bytes of a body, and some for
    each of its kilobytes, may be anything else: sizes and extensions of chunks, trailers. Past
    that, and past `MAX_PIPELINED` requests at once, the connection ends without a reply. The
    limits of bytes and headers are checked after each turn of the connection, which takes a few
    milliseconds, and those of the head when it is complete as well.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0.0  # all bytes since the head began, less those of the body
        self._num_headers = 0
        self._num_exact_bytes = 0  # of the head alone
        self._body_parts: list[bytes] = []
        self._unparsed = bytearray()
        self._turns = _turns.setdefault(self.server_state, Turns(self.loop))
        self._is_waiting = False
        self._turn_bytes = 2 * _TURN_BYTES[0]
        self._num_parts = 0
        self._is_in_head = False
        self._num_left = 0  # bytes of a body of declared length that have not come
        self._is_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a connection."""
        super().connection_made(cast("asyncio.Transport", _OpenTransport(transport)))

    def data_received(self, data: bytes) -> None:
        """Keep what came until it is this connection's turn to be parsed."""
        self._unparsed += data
        if not self._is_waiting:
            self._unset_keepalive_if_required()
            self._wait_for_turn()
        if self._is_waiting and len(self._unparsed) > _MAX_UNPARSED_BYTES:
            self.transport.pause_reading()

    def _wait_for_turn(self) -> None:
        self._is_waiting = True
        self._turns.add(self._take_turn)

    def _take_turn(self) -> bool:
        """Parse a part of what came, and end the connection if it is too much.

        Returns:
            Whether the connection was still open.
        """
        self._is_waiting = False
        if self._is_ended or self.parser is None or self.transport.is_closing():
            self._unparsed.clear()
            return False
        # A body of declared length is one part, however large.
        data = bytes(self._unparsed[: max(self._turn_bytes, self._num_left)])
        del self._unparsed[: len(data)]
        self._num_head_bytes += len(data)
        self._num_parts = 0
        super().data_received(data)
        self._pass_body_on()
        is_many = self._num_parts > _MANY_PARTS
        self._turn_bytes = _TURN_BYTES[0] if is_many else min(2 * self._turn_bytes, _TURN_BYTES[1])
        if self._is_ended:
            self._unparsed.clear()
        elif self._num_head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._refuse()
        elif self._unparsed:
            self._wait_for_turn()
        elif not self.flow.read_paused:
            self.transport.resume_reading()
        return True

    def on_message_begin(self) -> None:
        """Begin a request's head."""
        if self._is_ended:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse()
            return
        self._num_parts += 1
        self._num_exact_bytes = 0
        super().on_message_begin()
        self._is_in_head = True

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's URL."""
        if self._is_ended:
            return
        self._num_exact_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; one that comes after the body is a trailer, which is dropped."""
        if self._is_ended:
            return
        self._num_parts += 1
        self._num_headers += 1
        self._num_exact_bytes += len(name) + len(value) + len(b": \r\n")
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request's body, unless the head was too large: turns end anywhere."""
        if self._is_ended:
            return
        if self._num_exact_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._refuse()
            return
        self._is_in_head = False
        self._num_head_bytes = self._num_headers = 0
        # The parser has checked that it is one number.
        self._num_left = int(dict(self.headers).get(b"content-length") or 0)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if self._is_ended:
            return
        self._num_parts += 1
        self._num_head_bytes -= (1 + _FRAMING_SHARE) * len(body)
        self._num_left = max(0, self._num_left - len(body))
        self._body_parts.append(body)

    def on_message_complete(self) -> None:
        """End the request."""
        if self._is_ended:
            return
        self._num_head_bytes = self._num_headers = self._num_left = 0
        self._pass_body_on()
        super().on_message_complete()

    def _pass_body_on(self) -> None:
        """Pass on what came of a body: of many small chunks, all at once."""
        if self._body_parts and not self._is_ended:
            super().on_body(b"".join(self._body_parts))
            self._body_parts.clear()

    def _refuse(self) -> None:
        self._is_ended = True
        _closed.log()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._is_in_head and not is_answering:
            self.transport.write(_reply())
        self.transport.close()


class _OpenTransport:
    """A transport that passes over what comes after it has closed.

    uvloop raises an error then; but a protocol is told that its connection is lost one iteration of
    the event loop later, and uvicorn would log two tracebacks for a reply in between.
    """

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()


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
