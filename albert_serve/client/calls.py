"""A call: one request and the parser of its reply. A long list is split into several calls."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Generic, TypeVar, cast

from pydantic import ValidationError

from albert_serve.api.schemas import TRUNCATED_HEADER, WARNINGS_HEADER, ErrorReply, InfoReply
from albert_serve.errors import (
    BodyTooLargeError,
    QueueFullError,
    RequestError,
    TooMuchAtOnceError,
    request_error,
)

BAD_GATEWAY: Final = 502
_MAX_SHOWN_CHARS: Final = 200
_CHECK_SERVICE: Final = "Check that it is an albert-serve of this client's version."
# Index of an input at the beginning of a message or of its part after "; ".
_ITEM_INDEX: Final = re.compile(r"(?:^|(?<=; ))inputs\[(\d{1,18})\]")
# Callers configure the logger with this name (docs/client.md).
_logger = logging.getLogger("albert_serve.client.transport")

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, kw_only=True, slots=True)
class RawReply:
    """A complete HTTP response."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def beginning(self) -> str:
        """The beginning of the body, for messages."""
        return repr(self.content.decode(errors="replace")[:_MAX_SHOWN_CHARS])

    @property
    def retry_after_s(self) -> float | None:
        """The seconds in `Retry-After`, or None if it has no number."""
        value = self.headers.get("Retry-After", "")
        return float(value) if value.isdecimal() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[ReplyT]):
    """One request, and the parser of its reply.

    Attributes:
        method: HTTP method.
        path: path of the endpoint.
        body: JSON body, or None for GET.
        read: function that parses the content of a reply.
        start: index of the first input in the caller's list.
    """

    method: str
    path: str
    body: dict[str, Any] | None
    read: Callable[[bytes], ReplyT]
    start: int = 0

    @property
    def num_items(self) -> int:
        """The number of inputs, or 1 if `inputs` is not a list."""
        return len(self._items) or 1

    @property
    def has_list(self) -> bool:
        """Whether `inputs` is a list, so that the answer is a list."""
        return isinstance((self.body or {}).get("inputs"), list)

    @property
    def _items(self) -> list[Any]:
        items: list[Any] = (self.body or {})["inputs"] if self.has_list else []
        return items

    def answer(self, received: RawReply) -> ReplyT:
        """Return the answer in a reply, or raise the service's error."""
        if not received.is_success:
            raise self.error(received)
        _log_warnings(received)
        try:
            answer = self.read(received.content)
        except ValueError as error:  # such as a ValidationError
            raise RequestError(
                f"The reply of {received.url} is not an answer of {self.path}. {_CHECK_SERVICE} "
                f"The reply begins with {received.beginning}."
            ) from error
        if self.has_list and len(cast("list[Any]", answer)) != self.num_items:
            raise RequestError(
                f"{received.url} replied to {self.num_items} inputs with "
                f"{len(cast('list[Any]', answer))} answers. {_CHECK_SERVICE}"
            )
        return answer

    def error(self, received: RawReply) -> RequestError:
        """Return the error of a failed reply, with the indices of the caller's list."""
        error = _service_error(received)
        message = renumbered(str(error), self.start)
        is_of_list = isinstance(error, TooMuchAtOnceError | BodyTooLargeError)
        if is_of_list and self.has_list and self.num_items == 1 and error.input_index is None:
            message = f"inputs[{self.start}]: {message}"  # the list has only this input
        error.args = (message,)
        return error

    def parts(self, limits: InfoReply) -> list[Call[ReplyT]]:
        """Split the list into calls within the service's limits of items and bytes.

        An input that exceeds a limit by itself is sent alone.
        """
        num_free = limits.max_body_bytes - _num_bytes({**(self.body or {}), "inputs": []})
        starts = [0]
        num_used = 0
        for index, item in enumerate(self._items):
            item_bytes = _num_bytes(item) + 1  # a comma follows each item
            is_full = index - starts[-1] == limits.max_items or num_used + item_bytes > num_free
            if index > starts[-1] and is_full:
                starts.append(index)
                num_used = 0
            num_used += item_bytes
        return [self._part(start, end) for start, end in pairwise([*starts, self.num_items])]

    def halves(self) -> list[Call[ReplyT]]:
        """Split the list into two calls."""
        middle = len(self._items) // 2
        return [self._part(0, middle), self._part(middle, self.num_items)]

    def _part(self, start: int, end: int) -> Call[ReplyT]:
        body = {**(self.body or {}), "inputs": self._items[start:end]}
        return replace(self, body=body, start=self.start + start)


def _service_error(received: RawReply) -> RequestError:
    """Return the error of a failed reply."""
    try:
        reply = ErrorReply.model_validate_json(received.content)
    except ValidationError:
        message = f"{received.url} replied with status {received.status}: {received.beginning}."
        reply = ErrorReply(error=message, error_type="")
    # A proxy sends 502 while the service behind it is unavailable.
    status = 503 if received.status == BAD_GATEWAY else received.status
    error = request_error(status, reply.error, reply.error_type)
    error.request_id = reply.request_id
    if isinstance(error, QueueFullError) and received.retry_after_s is not None:
        error.retry_after_s = received.retry_after_s
    return error


def _log_warnings(received: RawReply) -> None:
    """Log the warnings of a successful reply."""
    try:
        warnings = json.loads(received.headers.get(WARNINGS_HEADER, "[]"))
    except ValueError:
        warnings = []
    for warning in warnings if isinstance(warnings, list) else []:
        _logger.warning("%s: %s", received.url, warning)
    num_truncated = received.headers.get(TRUNCATED_HEADER, "0")
    if num_truncated != "0":
        _logger.warning("%s: %s tokens were truncated.", received.url, num_truncated)


def renumbered(message: str, start: int) -> str:
    """Return a message about inputs of a part with their indices in the complete list."""
    return _ITEM_INDEX.sub(lambda match: f"inputs[{int(match[1]) + start}]", message)


def _num_bytes(value: object) -> int:
    """Return the size of a value in JSON, which is at least its size in a request of httpx."""
    return len(json.dumps(value, ensure_ascii=False).encode())
