"""The client's protocol without I/O: retries, delays, lists in parts, and readiness.

A call is a conversation: a generator that yields the next step, and receives its outcome. A step is
to send a request, to wait, or to hold other conversations at the same time. The sync and the async
client perform these steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar, cast

import httpx

from albert_serve.api.schemas import InfoReply
from albert_serve.client import requests
from albert_serve.client.calls import Call, renumbered
from albert_serve.client.replies import (
    BAD_GATEWAY,
    read_response,
    refusal,
    retry_after_s,
    with_message,
)
from albert_serve.client.replies import Received as Received
from albert_serve.client.server import Server
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
)

READY_TIMEOUT_S: Final = 60.0
_OVERLOADED: Final = 429
_RETRIED: Final = frozenset({_OVERLOADED, BAD_GATEWAY, 503})
_FIRST_DELAY_S: Final = 0.2
_LONGEST_PROBE_S: Final = 5.0
_LONGEST_PROBE_DELAY_S: Final = 2.0
# Over soon, as after a start.
_PASSING: Final = (DeadlineExceededError, NotReadyError, QueueFullError)

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
class Together:
    """Hold these conversations, as many at once as the client may, and return their results.

    They begin in their order. Once one has failed no other begins, and the error of the first
    that failed, in their order, is raised.
    """

    conversations: Sequence[Conversation[Any]]


# The outcome of a step; None for a wait.
Outcome: TypeAlias = Received | httpx.HTTPError | RequestError | list[Any] | None
Conversation: TypeAlias = Generator[Send | Wait | Together, Outcome, ReplyT]


class Deadline:
    """The deadline of a call."""

    def __init__(self, server: Server, timeout_s: float | None = None) -> None:
        self._base_url = server.base_url
        self._timeout_s = server.timeout_s if timeout_s is None else timeout_s
        self._ends_s = time.monotonic() + self._timeout_s

    def left_s(self) -> float:
        """Return the remaining time; not negative."""
        return max(0.0, self._ends_s - time.monotonic())

    def error(self) -> DeadlineExceededError:
        """Return the error of a call past its deadline."""
        return DeadlineExceededError(
            f"no reply from {self._base_url} within {self._timeout_s:g} s; "
            "send less at once, or raise timeout_s"
        )


@dataclass(kw_only=True, slots=True)
class Progress:
    """The number of requests of a call that were answered; that it grows is enough to know."""

    num_answered: int = 0


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
        deadline, progress = Deadline(self._server), Progress()
        if call.num_items < 2:
            return (yield from self._try(call, deadline, progress))
        limits = yield from self.fetch_limits(deadline)
        parts = call.parts(limits) if limits else [call]
        if len(parts) == 1:
            answers = yield from self._answer(parts[0], deadline, progress)
        else:
            conversations = [self._answer(part, deadline, progress) for part in parts]
            outcome = yield Together(conversations=conversations)
            answers = list(chain.from_iterable(cast("list[list[Any]]", outcome)))
        return cast("ReplyT", answers)  # a list is answered with a list

    def converse_in_turn(
        self, call: Call[Any], limits: InfoReply | None, progress: Progress
    ) -> Conversation[list[Any]]:
        """Get the answers to a list, one part after the other.

        Args:
            progress: of all conversations that are held at the same time.

        Raises:
            RequestError: there is no answer.
        """
        deadline = Deadline(self._server)
        answers: list[Any] = []
        for part in call.parts(limits) if limits else [call]:
            answers += yield from self._answer(part, deadline, progress)
        return answers

    def fetch_limits(self, deadline: Deadline | None = None) -> Conversation[InfoReply | None]:
        """Return the service's limits; None if it has no `/info`.

        Raises:
            RequestError: there is no answer.
        """
        if self._limits is None:
            deadline = deadline or Deadline(self._server)
            try:
                self._limits = yield from self._try(requests.info(), deadline, Progress())
            except NotFoundError:
                return None
        return self._limits

    def is_healthy(self) -> Conversation[bool]:
        """Return whether the service takes requests now.

        Raises:
            RequestError: it refuses to tell, which waiting does not change.
        """
        outcome = yield Send(call=requests.health(), timeout_s=self._server.timeout_s)
        return _reason_not_ready(outcome) is None

    def wait_until_ready(self, timeout_s: float) -> Conversation[None]:
        """Ask for the service's health until it takes requests.

        Raises:
            NotReadyError: it does not within the time; the message has the last attempt's outcome.
            RequestError: it refuses to tell, which waiting does not change.
        """
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s is {timeout_s}; it must be over 0")
        deadline = Deadline(self._server, timeout_s)
        delay_s = _FIRST_DELAY_S / 2
        seen = ""
        while True:
            probe_s = min(_LONGEST_PROBE_S, deadline.left_s())
            outcome = yield Send(call=requests.health(), timeout_s=probe_s)
            reason = _reason_not_ready(outcome)
            if reason is None:
                return
            # An attempt that the deadline cut short says less than the one before.
            is_cut = probe_s < _LONGEST_PROBE_S and isinstance(outcome, httpx.TimeoutException)
            seen = seen if seen and is_cut else reason
            if deadline.left_s() <= delay_s:
                raise NotReadyError(
                    f"{self._server.base_url} was not ready within {timeout_s:g} s; "
                    f"the last attempt: {seen}"
                )
            yield Wait(delay_s=delay_s)
            delay_s = min(2 * delay_s, _LONGEST_PROBE_DELAY_S)

    def _answer(
        self, call: Call[Any], deadline: Deadline, progress: Progress
    ) -> Conversation[list[Any]]:
        """Get the answers to a part of a list, in halves if it is too much at once."""
        answers: list[Any] = []
        parts = [call]
        while parts:
            part = parts.pop(0)
            try:
                answers += yield from self._try(part, deadline, progress)
            except (TooMuchAtOnceError, BodyTooLargeError) as error:
                # Only the service can count the tokens of a list.
                if part.num_items < 2:
                    message = str(error).removeprefix("inputs[0]: ")
                    raise with_message(error, f"inputs[{part.start}]: {message}") from error
                parts[:0] = part.halves()
            except InvalidInputError as error:
                raise with_message(error, renumbered(str(error), part.start)) from error
        return answers

    def _try(
        self, call: Call[ReplyT], deadline: Deadline, progress: Progress
    ) -> Conversation[ReplyT]:
        num_tries, num_answered = 0, progress.num_answered
        while True:
            if not deadline.left_s():
                raise deadline.error()
            outcome = yield Send(call=call, timeout_s=deadline.left_s())
            num_tries += 1
            if _is_overloaded(outcome) and progress.num_answered > num_answered:
                # Other parts of the call are answered, so that this one's turn will come.
                num_tries, num_answered = 0, progress.num_answered
            delay_s = _delay_s(outcome, num_tries)
            is_last = num_tries > self._server.num_retries
            if delay_s is None or is_last or delay_s >= deadline.left_s():
                reply = self._read(call, outcome, deadline)
                progress.num_answered += 1
                return reply
            yield Wait(delay_s=delay_s)

    def _read(self, call: Call[ReplyT], outcome: Outcome, deadline: Deadline) -> ReplyT:
        if isinstance(outcome, Received):
            return read_response(call, outcome)
        if isinstance(outcome, RequestError):
            raise outcome
        if isinstance(outcome, httpx.TimeoutException):
            raise deadline.error() from outcome
        assert isinstance(outcome, httpx.HTTPError)
        raise NotReadyError(
            f"cannot reach {self._server.base_url}: {_reason(outcome)}; is the service running?"
        ) from outcome


def _is_overloaded(outcome: Outcome) -> bool:
    return isinstance(outcome, Received) and outcome.status == _OVERLOADED


def _delay_s(outcome: Outcome, num_tries: int) -> float | None:
    """Return the delay before a retry; None if a retry is of no use."""
    asked_s = None
    if isinstance(outcome, Received):
        if outcome.status not in _RETRIED:
            return None
        asked_s = retry_after_s(outcome)
    elif not isinstance(outcome, httpx.NetworkError | httpx.RemoteProtocolError):
        return None  # a timeout, or a request that was never sent
    delay_s = _FIRST_DELAY_S * 2 ** (num_tries - 1) if asked_s is None else asked_s
    # Jitter, so that clients that were refused together do not retry together.
    return delay_s * random.uniform(1.0, 1.25)


def _reason_not_ready(outcome: Outcome) -> str | None:
    """Return why a service does not take requests; None if it does.

    Raises:
        RequestError: the reason is one that does not pass.
    """
    if isinstance(outcome, httpx.TimeoutException):
        return "no reply in time"
    if isinstance(outcome, httpx.HTTPError):
        return _reason(outcome)
    if isinstance(outcome, RequestError):
        raise outcome
    assert isinstance(outcome, Received)
    if 200 <= outcome.status < 300:
        return None
    error = refusal(outcome)
    if not isinstance(error, _PASSING):
        raise error
    return f"it replied {outcome.status}: {error}"


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
