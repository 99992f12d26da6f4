"""Replies of a service: the error in one, its warnings, and the items that these are about."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from albert_serve.api.schemas import TRUNCATED_HEADER, WARNINGS_HEADER, ErrorReply
from albert_serve.errors import QueueFullError, RequestError, request_error

BAD_GATEWAY: Final = 502
_MAX_SHOWN_CHARS: Final = 200
# A message's sentences begin with an index.
_ITEM_INDEX: Final = re.compile(r"(?:^|(?<=; ))inputs\[(\d{1,18})\]")
# A name that callers configure (docs/client.md).
_logger = logging.getLogger("albert_serve.client.transport")


@dataclass(frozen=True, kw_only=True, slots=True)
class RawReply:
    """A complete response."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_success(self) -> bool:
        """Whether it has an answer."""
        return 200 <= self.status < 300

    @property
    def beginning(self) -> str:
        """The beginning of the body, for messages."""
        return repr(
            self.content[: 4 * _MAX_SHOWN_CHARS].decode(errors="replace")[:_MAX_SHOWN_CHARS]
        )

    @property
    def retry_after_s(self) -> float | None:
        """The seconds of `Retry-After`; None without the header."""
        value = self.headers.get("Retry-After", "")
        return float(value) if value.isdecimal() else None


def service_error(received: RawReply) -> RequestError:
    """Return the error of a failed reply."""
    try:
        reply = ErrorReply.model_validate_json(received.content)
    except ValidationError:
        message = f"{received.url} replied {received.status}: {received.beginning}"
        reply = ErrorReply(error=message, error_type="")
    # A proxy's reply while the service behind it is away.
    status = 503 if received.status == BAD_GATEWAY else received.status
    error = request_error(status, reply.error, reply.error_type)
    error.request_id = reply.request_id
    if isinstance(error, QueueFullError) and received.retry_after_s is not None:
        error.retry_after_s = received.retry_after_s
    return error


def log_warnings(received: RawReply) -> None:
    """Log the warnings of a successful reply."""
    try:
        warnings = json.loads(received.headers.get(WARNINGS_HEADER, "[]"))
    except ValueError:
        warnings = []
    for warning in warnings if isinstance(warnings, list) else []:
        _logger.warning("%s: %s", received.url, warning)
    num_truncated = received.headers.get(TRUNCATED_HEADER, "0")
    if num_truncated != "0":
        _logger.warning("%s: %s tokens were cut off", received.url, num_truncated)


def renumbered(message: str, num_before: int) -> str:
    """Return a message about an item with the item's index in the whole list."""
    return _ITEM_INDEX.sub(lambda match: f"inputs[{int(match[1]) + num_before}]", message)
