"""What passes between a client and a service, without any I/O: tries, waits, and parts of lists.

A call is a conversation: a generator that yields what to do next, send or wait, and is sent what
came of it. The two clients differ in how they do these.
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
    TRUNCATED_HEADER,
    WARNINGS_HEADER,
    ErrorReply,
    InfoReply,
)
from albert_serve.client import requests
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

_RETRIED: Final = frozenset({429, 503})
_FIRST_DELAY_S: Final = 0.2
_MAX_CHARS_TOLD: Final = 200

_logger = logging.getLogger(__name__)
ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send this call, and give up after so long."""

    call: Call[Any]
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Do nothing for so long."""

    delay_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A response that has arrived whole."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    def __str__(self) -> str:
        return f"{self.url} replied {self.status}: {self.beginning}"

    @property
    def beginning(self) -> str:
        """What to show of its body."""
        return repr(self.content[: 4 * _MAX_CHARS_TOLD].decode(errors="replace")[:_MAX_CHARS_TOLD])


# What comes of a step: of a wait, nothing.
Outcome: TypeAlias = Received | httpx.HTTPError | None
Conversation: TypeAlias = Generator[Send | Wait, Outcome, ReplyT]


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Where calls go, and with what.

    Attributes:
        timeout_s: the time that a call has, with all its tries, waits and parts.
        num_retries: how often a request is sent again at most.
    """

    base_url: str
    headers: Mapping[str, str]
    timeout_s: float
    num_retries: int

    @classmethod
    def at(
        cls,
        base_url: str,
        *,
        model: str | None,
        api_key: str | None,
        timeout_s: float,
        num_retries: int,
    ) -> Server:
        """A service at this address, or one model of it.

        Raises:
            ConfigError: the address is not one of HTTP, or a number is out of its range.
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
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key holds characters that no header can have; is it whole?")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        path = "" if model is None else MODEL_PATH.format(model=quote(model, safe=""))
        return cls(
            base_url=base_url.rstrip("/") + path,
            headers=headers,
            timeout_s=timeout_s,
            num_retries=num_retries,
        )


def _host(url: str) -> str:
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:
        return ""


class Deadline:
    """When a call's time is up."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ends_s = time.monotonic() + server.timeout_s

    def left_s(self) -> float:
        """Time that the call still has; not negative."""
        return max(0.0, self._ends_s - time.monotonic())

    def error(self) -> DeadlineExceededError:
        """What to raise when there is none left."""
        return DeadlineExceededError(
            f"no reply from {self._server.base_url} within {self._server.timeout_s:g} s; "
            "send less at once, or raise timeout_s"
        )


class Exchange:
    """Holds the conversations of one client, and what it has learnt of its service."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limits: InfoReply | None = None

    def converse(self, call: Call[ReplyT]) -> Conversation[ReplyT]:
        """Get the answer to a call; a list goes in as many parts as the service's limits ask for.

        Raises:
            RequestError: there is no answer, as the subclass that the reason has.
        """
        deadline = Deadline(self._server)
        if call.num_items < 2:
            return (yield from self._try(call, deadline))
        limits = yield from self._learn_limits(deadline)
        answers: list[Any] = []
        parts = call.parts(limits) if limits else [call]
        while parts:
            part = parts.pop(0)
            try:
                answers.extend(cast("list[Any]", (yield from self._try(part, deadline))))
            except (TooMuchAtOnceError, BodyTooLargeError) as error:
                # What a list's items hold together, in tokens, only the service can count.
                if part.num_items < 2:
                    told = str(error).removeprefix("inputs[0]: ")
                    raise _retold(error, f"inputs[{len(answers)}]: {told}") from error
                parts[:0] = part.halves()
            except InvalidInputError as error:
                told = requests.renumbered(str(error), len(answers))
                raise _retold(error, told) from error
        return cast("ReplyT", answers)  # a list is answered with a list

    def _learn_limits(self, deadline: Deadline) -> Conversation[InfoReply | None]:
        """What the service takes; None where it does not say."""
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
        if isinstance(outcome, httpx.TimeoutException):
            raise deadline.error() from outcome
        reason = str(outcome) or type(outcome).__name__
        raise NotReadyError(
            f"cannot reach {self._server.base_url}: {reason}; is the service running?"
        ) from outcome


def _delay_s(outcome: Outcome, num_tries: int) -> float | None:
    """How long to wait before trying again; None where that would be of no use."""
    told_s = None
    if isinstance(outcome, Received):
        if outcome.status not in _RETRIED:
            return None
        told_s = _retry_after_s(outcome)
    elif not isinstance(outcome, httpx.NetworkError | httpx.RemoteProtocolError):
        return None  # out of time, or nothing that was ever sent
    least_s = _FIRST_DELAY_S * 2 ** (num_tries - 1) if told_s is None else told_s
    # Spread out, so that clients that were refused together do not come back together.
    return least_s * random.uniform(1.0, 1.25)


def read_response(call: Call[ReplyT], response: Received) -> ReplyT:
    """The answer, or the error that the service gave.

    Raises:
        RequestError: the service refused, as the subclass that its status has; or the reply is
            not one of this service.
    """
    if not 200 <= response.status < 300:
        raise _refusal(response)
    _log_remarks(response)
    try:
        return call.read(response.content)
    except (ValidationError, LookupError) as error:
        raise RequestError(
            f"{response.url} replied with something that is not an answer of {call.path}; "
            f"is it an albert-serve of this version? It begins {response.beginning}"
        ) from error


def _refusal(response: Received) -> RequestError:
    try:
        told = ErrorReply.model_validate_json(response.content)
    except ValidationError:
        told = ErrorReply(error=str(response), error_type="")
    error = request_error(response.status, told.error, told.error_type)
    error.request_id = told.request_id
    after_s = _retry_after_s(response)
    if isinstance(error, QueueFullError) and after_s is not None:
        error.retry_after_s = after_s
    return error


def _retold(error: RequestError, told: str) -> RequestError:
    """The same error with another message, which has the number of the item in the whole list."""
    retold = type(error)(told)
    retold.request_id = error.request_id
    return retold


def _retry_after_s(response: Received) -> float | None:
    """The seconds that the reply asks to wait, as such or as a date; None where it does not say."""
    told = response.headers.get("Retry-After", "")
    if told.isdecimal():
        return float(told)
    try:
        until = parsedate_to_datetime(told)
    except (ValueError, OverflowError):
        return None
    if until.tzinfo is None:
        return None
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def _log_remarks(response: Received) -> None:
    try:
        remarks = json.loads(response.headers.get(WARNINGS_HEADER, "[]"))
    except ValueError:
        remarks = []
    for remark in remarks if isinstance(remarks, list) else []:
        _logger.warning("%s: %s", response.url, remark)
    num_truncated = response.headers.get(TRUNCATED_HEADER, "0")
    if num_truncated != "0":
        _logger.warning("%s: %s tokens were cut off", response.url, num_truncated)
