"""The client's protocol without I/O: retries, delays, and splitting of lists.

A call is a conversation: a generator that yields the next step, send or wait, and receives its
outcome. The sync and the async client perform these steps.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeAlias, TypeVar, cast
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from albert_serve.api.schemas import (
    MODEL_PATH,
    TRUNCATED_AT_HEADER,
    TRUNCATED_HEADER,
    WARNINGS_HEADER,
    ErrorReply,
    InfoReply,
)
from albert_serve.client import requests
from albert_serve.client.body import ACCEPTED_ENCODING, ReplyBody
from albert_serve.client.requests import Call
from albert_serve.errors import (
    BodyTooLargeError,
    ConfigError,
    DeadlineExceededError,
    InvalidInputError,
    NotFoundError,
    NotReadyError,
    QueueFullError,
    RequestError,
    TooMuchAtOnceError,
    request_error,
)

TIMEOUT_S: Final = 30.0
NUM_RETRIES: Final = 2
_BAD_GATEWAY: Final = 502
_RETRIED: Final = frozenset({429, _BAD_GATEWAY, 503})
_FIRST_DELAY_S: Final = 0.2
_MAX_SHOWN_CHARS: Final = 200

_logger = logging.getLogger(__name__)
ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send this call, with a timeout."""

    call: Call[Any]
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Wait before the next step."""

    delay_s: float


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


# The outcome of a step; None for a wait.
Outcome: TypeAlias = Received | httpx.HTTPError | RequestError | None
Conversation: TypeAlias = Generator[Send | Wait, Outcome, ReplyT]


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """The address of a service, and the options of calls.

    Attributes:
        timeout_s: the time limit of a call, with all its retries, waits and parts.
        num_retries: the limit of retries of a request.
        max_reply_bytes: the limit of a reply, decoded.
    """

    base_url: str
    headers: Mapping[str, str]
    timeout_s: float
    num_retries: int
    max_reply_bytes: int

    @classmethod
    def at(
        cls,
        base_url: str,
        *,
        model: str | None,
        api_key: str | None,
        timeout_s: float,
        num_retries: int,
        max_reply_bytes: int,
    ) -> Server:
        """Return the service at this address, or one model of it.

        Raises:
            ConfigError: the address is not an HTTP URL, or a number is out of its range.
        """
        if not base_url.startswith(("http://", "https://")) or not _host(base_url):
            raise ConfigError(
                f"base_url is {base_url!r}; it must begin with http:// or https://, and a host, "
                'such as "http://127.0.0.1:3000"'
            )
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s is {timeout_s}; it must be over 0")
        if num_retries < 0:
            raise ConfigError(f"num_retries is {num_retries}; it must be 0 or more")
        if max_reply_bytes < 1:
            raise ConfigError(f"max_reply_bytes is {max_reply_bytes}; it must be 1 or more")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key holds characters that no header can have; is it whole?")
        headers = {"Accept-Encoding": ACCEPTED_ENCODING}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        path = "" if model is None else MODEL_PATH.format(model=quote(model, safe=""))
        return cls(
            base_url=base_url.rstrip("/") + path,
            headers=headers,
            timeout_s=timeout_s,
            num_retries=num_retries,
            max_reply_bytes=max_reply_bytes,
        )

    def body(self, response: httpx.Response) -> ReplyBody:
        """Return the collector of a response's body.

        Raises:
            RequestError: the response has an encoding that was not asked for.
        """
        return ReplyBody(response, self.max_reply_bytes)


def _host(url: str) -> str:
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:
        return ""


class Deadline:
    """The deadline of a call."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ends_s = time.monotonic() + server.timeout_s

    def left_s(self) -> float:
        """Return the remaining time; not negative."""
        return max(0.0, self._ends_s - time.monotonic())

    def error(self) -> DeadlineExceededError:
        """Return the error of a call past its deadline."""
        return DeadlineExceededError(
            f"no reply from {self._server.base_url} within {self._server.timeout_s:g} s; "
            "send less at once, or raise timeout_s"
        )


class Exchange:
    """Runs the conversations of one client, and caches the limits of its service."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limits: InfoReply | None = None

    def converse(self, call: Call[ReplyT]) -> Conversation[ReplyT]:
        """Get the answer to a call; a list is split into parts within the service's limits.

        Raises:
            RequestError: there is no answer; the subclass gives the reason.
        """
        deadline = Deadline(self._server)
        if call.num_items < 2:
            return (yield from self._try(call, deadline))
        limits = yield from self._fetch_limits(deadline)
        answers: list[Any] = []
        parts = call.parts(limits) if limits else [call]
        while parts:
            part = parts.pop(0)
            try:
                answers.extend(cast("list[Any]", (yield from self._try(part, deadline))))
            except (TooMuchAtOnceError, BodyTooLargeError) as error:
                # Only the service can count the tokens of a list.
                if part.num_items < 2:
                    message = str(error).removeprefix("inputs[0]: ")
                    raise _with_message(error, f"inputs[{part.start}]: {message}") from error
                parts[:0] = part.halves()
            except InvalidInputError as error:
                message = requests.renumbered(str(error), part.start)
                raise _with_message(error, message) from error
        return cast("ReplyT", answers)  # a list is answered with a list

    def _fetch_limits(self, deadline: Deadline) -> Conversation[InfoReply | None]:
        """Return the service's limits; None if it has no `/info`."""
        if self._limits is None:
            try:
                self._limits = yield from self._try(requests.info(), deadline)
            except NotFoundError:
                return None
        return self._limits

    def _try(self, call: Call[ReplyT], deadline: Deadline) -> Conversation[ReplyT]:
        num_tries = 0
        while True:
            if not deadline.left_s():
                raise deadline.error()
            outcome = yield Send(call=call, timeout_s=deadline.left_s())
            num_tries += 1
            delay_s = _delay_s(outcome, num_tries)
            is_last = num_tries > self._server.num_retries
            if delay_s is None or is_last or delay_s >= deadline.left_s():
                return self._read(call, outcome, deadline)
            yield Wait(delay_s=delay_s)

    def _read(self, call: Call[ReplyT], outcome: Outcome, deadline: Deadline) -> ReplyT:
        if isinstance(outcome, Received):
            return read_response(call, outcome)
        if isinstance(outcome, RequestError):
            raise outcome
        if isinstance(outcome, httpx.TimeoutException):
            raise deadline.error() from outcome
        reason = str(outcome) or type(outcome).__name__
        raise NotReadyError(
            f"cannot reach {self._server.base_url}: {reason}; is the service running?"
        ) from outcome


def _delay_s(outcome: Outcome, num_tries: int) -> float | None:
    """Return the delay before a retry; None if a retry is of no use."""
    retry_after_s = None
    if isinstance(outcome, Received):
        if outcome.status not in _RETRIED:
            return None
        retry_after_s = _retry_after_s(outcome)
    elif not isinstance(outcome, httpx.NetworkError | httpx.RemoteProtocolError):
        return None  # a timeout, or a request that was never sent
    delay_s = _FIRST_DELAY_S * 2 ** (num_tries - 1) if retry_after_s is None else retry_after_s
    # Jitter, so that clients that were refused together do not retry together.
    return delay_s * random.uniform(1.0, 1.25)


def read_response(call: Call[ReplyT], response: Received) -> ReplyT:
    """Return the answer, or raise the service's error.

    Raises:
        RequestError: the service refused, as the subclass that its status has; or the reply is
            not one of this service.
    """
    if not 200 <= response.status < 300:
        raise _refusal(response)
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


def _refusal(response: Received) -> RequestError:
    try:
        reply = ErrorReply.model_validate_json(response.content)
    except ValidationError:
        reply = ErrorReply(error=str(response), error_type="")
    # A proxy's reply while the service behind it is away.
    status = 503 if response.status == _BAD_GATEWAY else response.status
    error = request_error(status, reply.error, reply.error_type)
    error.request_id = reply.request_id
    after_s = _retry_after_s(response)
    if isinstance(error, QueueFullError) and after_s is not None:
        error.retry_after_s = after_s
    return error


def _with_message(error: RequestError, message: str) -> RequestError:
    """Return a copy of the error with another message."""
    copy = type(error)(message)
    copy.request_id = error.request_id
    return copy


def _retry_after_s(response: Received) -> float | None:
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
        shown = requests.renumbered_places(places, call.start)[:_MAX_SHOWN_CHARS]
        _logger.warning("%s: %s tokens were cut off %s", response.url, num_truncated, shown)
