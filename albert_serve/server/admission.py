"""Who comes in: what would wait too long is refused before any work is done for it.

To read, check and tokenise a request takes a process far longer than to refuse it here, and what
has been read waits for the processor even where the engine's queue is short. So the queue's own
bound is not enough: asked for ten times of what it can do, a service would do little but read.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.batching.throughput import limit_retry_after_s
from albert_serve.errors import QueueFullError
from albert_serve.server.auth import PRIORITY_HEADER
from albert_serve.server.error_replies import error_response, find_or_make_id

_BUSY_INSIDE: Final = 16  # so many keep the service busy
_IDLE_INSIDE: Final = 4  # fewer do not
# So many are never too many: 64 callers that ask again and again get in, however slow the model.
_LEAST_INSIDE: Final = 72
# But where more are refused than answered, as at many times of what can be done, fewer are taken.
_LEAST_IN_A_RUSH: Final = 32
_FIRST_INSIDE: Final = 256  # so many are let in until it was busy for once
_WINDOW_S: Final = 1.0  # many turns of the event loop, which answers in bursts
_SMOOTHING: Final = 0.3
_TELL_EVERY_S: Final = 10.0
_REFUSAL: Final = "albert_serve.refusal"
_logger = logging.getLogger(__name__)


class Crowd:
    """The requests that are inside, and how many may be for none to stay too long.

    Who comes in stays as long as it takes to get through those who are there: their number by the
    requests that are answered in a second. That is measured while there are enough of them to keep
    the service busy, and holds for whatever it is short of. What is refused inside or is not valid
    takes less than an answer: a time with more of these than of answers teaches nothing.

    Args:
        max_stay_s: so long may one stay.
        clock: in seconds.
    """

    def __init__(self, max_stay_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_inside = 0
        self._max_stay_s = max_stay_s
        self._clock = clock
        self._per_s = 0.0
        self._busy_since_s: float | None = None  # when this measurement began
        self._num_answered = self._num_late = self._num_others = self._num_refused = 0
        self._least = _LEAST_INSIDE

    @property
    def most(self) -> int:
        """So many may be inside."""
        if not self._per_s:
            return _FIRST_INSIDE
        return max(self._least, int(self._per_s * self._max_stay_s))

    @property
    def stay_s(self) -> float:
        """How long one that came in now would stay; 0 before that is known."""
        return self.num_inside / self._per_s if self._per_s else 0.0

    def is_full(self) -> bool:
        """Whether one more is too many."""
        return self.num_inside >= self.most

    def enter(self) -> None:
        """One more is inside."""
        self.num_inside += 1
        if self._busy_since_s is None and self.num_inside >= _BUSY_INSIDE:
            self._begin()

    def refuse(self) -> None:
        """One more is not let in."""
        self._num_refused += 1

    def leave(self, status: int | None = HTTPStatus.OK) -> None:
        """One has its reply of this status, or is gone without one."""
        self.num_inside -= 1
        if status == HTTPStatus.GATEWAY_TIMEOUT:
            self._num_late += 1
        elif status is not None and status < HTTPStatus.BAD_REQUEST:
            self._num_answered += 1
        else:
            self._num_others += 1
        if self._busy_since_s is None:
            return
        if self.num_inside < _IDLE_INSIDE:  # what comes next may come much later
            self._busy_since_s = None
            return
        elapsed_s = self._clock() - self._busy_since_s
        if elapsed_s < _WINDOW_S:
            return
        self._busy_since_s = None
        if self.num_inside >= _BUSY_INSIDE // 2:  # else it answered what came, less than it could
            num_done = self._num_answered + self._num_late
            if self._num_others <= num_done:
                self._learn(self._num_answered / elapsed_s)
            is_rush = self._num_refused > num_done
            self._least = _LEAST_IN_A_RUSH if is_rush else _LEAST_INSIDE
            self._begin()

    def _begin(self) -> None:
        self._busy_since_s = self._clock()
        self._num_answered = self._num_late = self._num_others = self._num_refused = 0

    def _learn(self, per_s: float) -> None:
        self._per_s += _SMOOTHING * (per_s - self._per_s) if self._per_s else per_s


class House(Protocol):
    """What a door needs to know of who is behind it."""

    def asked_by(self, path: str) -> tuple[str, str] | None:
        """The names of the model and of the task that a path asks; None for any other path."""
        ...

    def refused(self, model: str, task: str) -> None:
        """A request was not let in."""
        ...


class Door:
    """ASGI middleware, outside of all others: answers 429 at once where too many are inside.

    Each model has a place of its own inside, and batch jobs have one apart. A request is inside
    from when its body has come until its reply begins: who sends or reads slowly keeps nobody out.

    Args:
        house: gives who is behind the door; None while the service starts.
        max_stay_s: how long interactive requests may stay, as far as can be told.
        max_batch_stay_s: how long batch jobs may.
        around_refusals: middleware that only refusals go through.
    """

    def __init__(
        self,
        app: ASGIApp,
        house: Callable[[], House | None],
        max_stay_s: float,
        max_batch_stay_s: float,
        around_refusals: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        self.app = app
        self._refuse = around_refusals(_refuse)
        self._house = house
        self._stays_s: dict[bool, float] = {False: max_stay_s, True: max_batch_stay_s}
        self._crowds: dict[tuple[str, bool], Crowd] = {}
        self._num_refused = 0
        self._told_s = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        house = self._house()
        is_task = scope["type"] == "http" and scope["method"] == "POST"
        asked = house.asked_by(scope["path"]) if house and is_task else None
        if house is None or asked is None:
            await self.app(scope, receive, send)
            return
        model, task = asked
        headers = Headers(scope=scope)
        crowd = self._crowd(model, headers.get(PRIORITY_HEADER, "").strip().lower() == "batch")
        if not crowd.is_full():
            await self._pass(crowd, scope, receive, send)
            return
        crowd.refuse()
        house.refused(model, task)
        self._tell(model)
        scope["albert_serve.request_id"] = find_or_make_id(headers)
        scope[_REFUSAL] = _full(crowd)
        await self._refuse(scope, receive, send)

    def _crowd(self, model: str, is_batch: bool) -> Crowd:
        crowd = self._crowds.get((model, is_batch))
        if crowd is None:
            crowd = self._crowds[model, is_batch] = Crowd(self._stays_s[is_batch])
        return crowd

    def _tell(self, model: str) -> None:
        """A line in the log now and then: one for each would be work that there is no time for."""
        self._num_refused += 1
        if time.monotonic() - self._told_s < _TELL_EVERY_S:
            return
        _logger.warning("%d requests refused, the last to model %s", self._num_refused, model)
        self._num_refused, self._told_s = 0, time.monotonic()

    async def _pass(self, crowd: Crowd, scope: Scope, receive: Receive, send: Send) -> None:
        entered = left = False

        async def read() -> Message:
            nonlocal entered
            message = await receive()
            if not entered and not left and not message.get("more_body"):
                entered = True
                crowd.enter()
            return message

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                leave(message["status"])
            await send(message)

        def leave(status: int | None) -> None:
            nonlocal left
            if entered and not left:
                crowd.leave(status)
            left = True

        try:
            await self.app(scope, read, reply)
        finally:
            leave(None)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(scope[_REFUSAL], scope)(scope, receive, send)


def _full(crowd: Crowd) -> QueueFullError:
    return QueueFullError(
        f"{crowd.num_inside} requests are being answered, which takes {crowd.stay_s:.2g} s; "
        f"{crowd.most} are taken at once; try again later",
        retry_after_s=limit_retry_after_s(crowd.stay_s),
    )
