"""Limits on what a request may send besides its body: the request line, headers and trailers.

uvicorn has such limits with h11 only, which parses in Python. BentoML leaves uvicorn to choose its
parser, so the protocol below is put in the place of uvicorn's choice (`limit_heads`).
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 1 << 16
# What the parser gets at once, which it may hold without telling.
_SLICE_BYTES: Final = 1 << 14
_TOO_LARGE: Final = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
_logger = logging.getLogger(__name__)


def limit_heads() -> None:
    """Make the servers that this process starts use `LimitedHttpProtocol`."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedHttpProtocol.__name__}"


class LimitedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 with at most `MAX_HEAD_BYTES` between two pieces of body; trailers are dropped.

    Past the limit the reply is 431 and the connection ends. In the middle of a body (trailers,
    extensions of chunks) the connection ends without a reply.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._is_in_head = False
        self._is_ended = False

    def data_received(self, data: bytes) -> None:
        """Parse what came, and end the connection if a head is too large."""
        for part in _slices(data):
            if self._is_ended or self.parser is None or self.transport.is_closing():
                return
            self._num_head_bytes += len(part)
            super().data_received(part)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse()

    def on_message_begin(self) -> None:
        """Begin a request's head."""
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; one that comes after the body is a trailer, which is dropped."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request's body."""
        self._is_in_head = False
        self._num_head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        self._num_head_bytes = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        self._is_ended = True
        _logger.warning("a request's headers are over %d bytes: connection closed", MAX_HEAD_BYTES)
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._is_in_head and not is_answering:
            self.transport.write(_reply())
        self.transport.close()


def _slices(data: bytes) -> Iterator[bytes]:
    view = memoryview(data)
    return (bytes(view[i : i + _SLICE_BYTES]) for i in range(0, len(data), _SLICE_BYTES))


def _reply() -> bytes:
    request_id = uuid.uuid4().hex
    body = json.dumps(
        {
            "error": f"the request line and headers are over {MAX_HEAD_BYTES} bytes",
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
