"""Replies of a service: the body, never larger than allowed, and the answer or error in it."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, cast

import httpx
from pydantic import ValidationError

from albert_serve.api.schemas import (
    TRUNCATED_AT_HEADER,
    TRUNCATED_HEADER,
    WARNINGS_HEADER,
    ErrorReply,
)
from albert_serve.client.calls import Call, ReplyT, renumbered_places
from albert_serve.errors import QueueFullError, RequestError, request_error

BAD_GATEWAY: Final = 502
_MAX_SHOWN_CHARS: Final = 200
# As much as a service's answers may take of its memory (docs/security.md).
MAX_REPLY_BYTES: Final = 64 << 20
ACCEPTED_ENCODING: Final = "gzip"
_GZIP_WINDOW: Final = 31

# A name that callers configure (docs/client.md).
_logger = logging.getLogger("albert_serve.client.transport")


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A complete response."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    @classmethod
    def of(cls, response: httpx.Response, body: ReplyBody) -> Received:
        """Return the response with its body, which has been read."""
        return cls(
            url=str(response.url),
            status=response.status_code,
            headers=response.headers,
            content=body.content,
        )

    def __str__(self) -> str:
        return f"{self.url} replied {self.status}: {self.beginning}"

    @property
    def beginning(self) -> str:
        """The beginning of the body, for messages."""
        return repr(
            self.content[: 4 * _MAX_SHOWN_CHARS].decode(errors="replace")[:_MAX_SHOWN_CHARS]
        )


def read_response(call: Call[ReplyT], response: Received) -> ReplyT:
    """Return the answer, or raise the service's error.

    Raises:
        RequestError: the service refused, as the subclass that its status has; or the reply is
            not one of this service.
    """
    if not 200 <= response.status < 300:
        raise refusal(response)
    _log_warnings(call, response)
    try:
        answer = call.read(response.content)
    except ValueError as error:  # a ValidationError is one
        raise RequestError(
            f"{response.url} replied with something that is not an answer of {call.path}; "
            f"is it an albert-serve of this version? It begins {response.beginning}"
        ) from error
    if call.has_list and len(cast("list[Any]", answer)) != call.num_items:
        raise RequestError(
            f"{response.url} replied to {call.num_items} inputs with "
            f"{len(cast('list[Any]', answer))} answers; is it an albert-serve of this version?"
        )
    return answer


def refusal(response: Received) -> RequestError:
    """Return the error of a reply that is no success."""
    try:
        reply = ErrorReply.model_validate_json(response.content)
    except ValidationError:
        reply = ErrorReply(error=str(response), error_type="")
    # A proxy's reply while the service behind it is away.
    status = 503 if response.status == BAD_GATEWAY else response.status
    error = request_error(status, reply.error, reply.error_type)
    error.request_id = reply.request_id
    after_s = retry_after_s(response)
    if isinstance(error, QueueFullError) and after_s is not None:
        error.retry_after_s = after_s
    return error


def with_message(error: RequestError, message: str) -> RequestError:
    """Return a copy of the error with another message."""
    copy = type(error)(message)
    copy.request_id = error.request_id
    return copy


def retry_after_s(response: Received) -> float | None:
    """Return the delay of `Retry-After`, in seconds or as a date; None if there is none."""
    value = response.headers.get("Retry-After", "")
    if value.isdecimal():
        return float(value)
    try:
        until = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    if until.tzinfo is None:
        return None
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def _log_warnings(call: Call[Any], response: Received) -> None:
    try:
        warnings = json.loads(response.headers.get(WARNINGS_HEADER, "[]"))
    except ValueError:
        warnings = []
    for warning in warnings if isinstance(warnings, list) else []:
        _logger.warning("%s: %s", response.url, warning)
    num_truncated = response.headers.get(TRUNCATED_HEADER, "0")
    if num_truncated != "0":
        places = response.headers.get(TRUNCATED_AT_HEADER, "")
        shown = renumbered_places(places, call.start)[:_MAX_SHOWN_CHARS]
        _logger.warning("%s: %s tokens were cut off %s", response.url, num_truncated, shown)


class ReplyBody:
    """Collects the body of one reply, plain or in gzip.

    httpx decodes each part that arrives as a whole, which a few kilobytes of gzip can make a
    thousand times larger; here no more is decoded than may be kept.

    Args:
        response: the reply, of which nothing was read.
        max_bytes: the limit of the decoded body, and of what is sent of it.

    Raises:
        RequestError: the reply has another encoding.
    """

    def __init__(self, response: httpx.Response, max_bytes: int) -> None:
        url = str(response.url)
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if response.is_stream_consumed:  # a transport of the caller's gave it whole, and decoded
            encoding = "identity"
        if encoding not in ("identity", ACCEPTED_ENCODING):
            raise RequestError(
                f"{url} replied in the encoding {encoding!r}; only {ACCEPTED_ENCODING} was asked "
                "for: what is between the client and the service changes replies"
            )
        self._url = url
        self._max_bytes = max_bytes
        self._decoder = None if encoding == "identity" else zlib.decompressobj(_GZIP_WINDOW)
        self._num_sent = 0
        self._content = bytearray()
        if response.is_stream_consumed:
            self.add(response.content)

    @property
    def content(self) -> bytes:
        """The body, as far as it has been decoded."""
        return bytes(self._content)

    def add(self, sent: bytes) -> None:
        """Decode a part of the body.

        Raises:
            RequestError: the body is over the limit, or damaged.
        """
        self._num_sent += len(sent)
        self._content += sent if self._decoder is None else self._decode(sent)
        if max(self._num_sent, len(self._content)) > self._max_bytes:
            raise RequestError(
                f"the reply of {self._url} is over {self._max_bytes} bytes; ask for less at once "
                "(fewer inputs, a smaller top_k), or raise max_reply_bytes"
            )

    def _decode(self, sent: bytes) -> bytes:
        assert self._decoder is not None
        try:
            # One byte more than is allowed shows that there is more.
            num_free = self._max_bytes + 1 - len(self._content)
            return self._decoder.decompress(sent, num_free)
        except zlib.error as error:
            raise RequestError(f"the reply of {self._url} is damaged: {error}") from error
