"""Calls of Ray's actors: each actor has up to two, and one that is overdue goes to another too."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakValueDictionary

from albert_serve.api.schemas import TaskRequest
from albert_serve.scoring.answers import Result

# So that an actor has its next call when it is ready with one.
_CALLS_AN_ACTOR: Final = 2
# Ray takes some seconds to notice that a node is gone; until then calls of its actors fail at once.
_REST_S: Final = 5.0
_MAX_FAILURES: Final = 10

_LOG: Final = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, weakref_slot=True, eq=False)
class Call:
    """The requests of a part, and their results when they are there.

    Attributes:
        num_sent: the actors that it was sent to.
        num_failed: those of them that were out of reach.
        sent_s: when it was sent last.
    """

    number: int
    requests: Sequence[TaskRequest]
    num_sent: int = 0
    num_failed: int = 0
    sent_s: float = 0.0
    results: list[Result] | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class _Member:
    """An actor.

    Attributes:
        calls: the numbers of its calls by their references, in the order in which it answers them.
        begun_s: when it began with the first.
        rests_until_s: when it may have calls again after it was out of reach.
    """

    actor: Any
    calls: dict[Any, int] = field(default_factory=dict)
    begun_s: float = 0.0
    rests_until_s: float = 0.0


class CallPool:
    """Gives calls to actors whose `answer` returns results and the seconds that they took.

    A call that nobody holds any more is forgotten.

    Args:
        ray: the module.
        patience_s: the least time after which an actor's calls are overdue; it grows to the longest
            that a call has taken which went to one actor only.
    """

    def __init__(self, ray: Any, patience_s: float) -> None:
        self._ray = ray
        self.patience_s = patience_s
        self._members: list[_Member] = []
        self._calls: WeakValueDictionary[int, Call] = WeakValueDictionary()
        self._waiting: deque[int] = deque()
        self._num_calls = 0

    @property
    def num_actors(self) -> int:
        """The actors that have been added."""
        return len(self._members)

    def add(self, actor: Any) -> None:
        """Add an actor that can answer."""
        self._members.append(_Member(actor=actor))
        self._send_waiting()

    def submit(self, requests: Sequence[TaskRequest]) -> Call:
        """Return a call, which is sent to an actor as soon as one is ready for it."""
        call = Call(number=self._num_calls, requests=requests)
        self._num_calls += 1
        self._calls[call.number] = call
        self._waiting.append(call.number)
        self._send_waiting()
        return call

    def receive(self, timeout_s: float) -> None:
        """Take the results that are there; if there are none, wait for the first.

        Raises:
            RayError: a call failed.
        """
        if not self._take(None, 0.0):
            self._send_overdue()
            self._take(1, timeout_s)
        self._send_waiting()

    def _take(self, count: int | None, timeout_s: float) -> bool:
        members = {reference: member for member in self._members for reference in member.calls}
        if not members:  # all are out of reach
            time.sleep(timeout_s)
            return False
        done, _ = self._ray.wait(
            list(members), num_returns=count or len(members), timeout=timeout_s
        )
        for reference in done:
            member = members[reference]
            call = self._calls.get(member.calls.pop(reference))
            member.begun_s = time.monotonic()
            if call is not None and call.results is None:
                self._take_results(member, call, reference)
        return bool(done)

    def _take_results(self, member: _Member, call: Call, reference: Any) -> None:
        try:
            call.results, duration_s = self._ray.get(reference)
        except self._ray.exceptions.ActorUnavailableError:
            call.num_failed += 1
            if call.num_failed > _MAX_FAILURES:
                raise
            member.rests_until_s = time.monotonic() + _REST_S
            self._waiting.appendleft(call.number)
            _LOG.warning("a worker is out of reach: its part is given to the next that is free")
            return
        if call.num_sent == 1:
            self.patience_s = max(self.patience_s, duration_s)

    def _send(self, member: _Member, call: Call) -> None:
        now_s = time.monotonic()
        if not member.calls:
            member.begun_s = now_s
        call.sent_s = now_s
        call.num_sent += 1
        member.calls[member.actor.answer.remote(call.requests)] = call.number

    def _send_waiting(self) -> None:
        while self._waiting:
            call = self._calls.get(self._waiting[0])
            if call is not None and call.results is None:
                free = [
                    member
                    for member in self._members
                    if len(member.calls) < _CALLS_AN_ACTOR
                    and not self._is_late(member)
                    and not _is_resting(member)
                ]
                if not free:
                    return
                self._send(min(free, key=lambda member: len(member.calls)), call)
            self._waiting.popleft()

    def _send_overdue(self) -> None:
        """Send the calls of actors that are late to those that have none, the first ones first."""
        late = sorted({n for m in self._members if self._is_late(m) for n in m.calls.values()})
        calls = [call for number in late if (call := self._calls.get(number)) is not None]
        overdue = [call for call in calls if call.results is None and self._is_past(call.sent_s)]
        idle = [one for one in self._members if not one.calls and not _is_resting(one)]
        for call, member in zip(overdue, idle, strict=False):
            _LOG.warning("a part is given to another worker as well")
            self._send(member, call)

    def _is_late(self, member: _Member) -> bool:
        return bool(member.calls) and self._is_past(member.begun_s)

    def _is_past(self, time_s: float) -> bool:
        return time.monotonic() - time_s > self.patience_s


def _is_resting(member: _Member) -> bool:
    return time.monotonic() < member.rests_until_s
