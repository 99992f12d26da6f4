"""Who comes in: what would wait too long is refused before any work is done for it.

To read, check and tokenise a request takes a process far longer than to refuse it here, and what
has been read waits for the processor even where the engine's queue is short. So the queue's own
bound is not enough: asked for ten times of what it can do, a service would do little but read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.access import PRIORITY_HEADER
from albert_serve.envelope import error_response, find_or_make_id
from albert_serve.errors import QueueFullError
from albert_serve.tasks import TASKS

_BUSY_INSIDE: Final = 16  # so many keep the service busy
# So many are never too many. Were it fewer, the hops of each over a slow event loop would be what
# is measured, and fewer still be let in.
_LEAST_INSIDE: Final = 32
_FIRST_INSIDE: Final = 256  # so many are let in until it was busy for once
_WINDOW_S: Final = 1.0  # many turns of the event loop, which answers in bursts
_SMOOTHING: Final = 0.3


class Crowd:
    """The requests that are inside, and how many may be for none to stay too long.

    Who comes in stays as long as it takes to get through those who are there: their number by the
    requests that are answered in a second. That is measured while there are enough of them to keep
    the service busy, and holds for whatever it is short of.

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
        self._num_left = 0

    @property
    def most(self) -> int:
        """So many may be inside."""
        if not self._per_s:
            return _FIRST_INSIDE
        return max(_LEAST_INSIDE, int(self._per_s * self._max_stay_s))

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
            self._busy_since_s, self._num_left = self._clock(), 0

    def leave(self) -> None:
        """One has its answer."""
        self.num_inside -= 1
        self._num_left += 1
        if self._busy_since_s is None:
            return
        elapsed_s = self._clock() - self._busy_since_s
        if elapsed_s < _WINDOW_S:
            return
        self._busy_since_s = None
        if self.num_inside >= _BUSY_INSIDE // 2:  # else it answered what came, less than it could
            per_s = self._num_left / elapsed_s
            self._per_s += _SMOOTHING * (per_s - self._per_s) if self._per_s else per_s
            self._busy_since_s, self._num_left = self._clock(), 0


class Door:
    """ASGI middleware, outside of all others: answers 429 at once where too many are inside.

    A request is inside from when its body has come: who sends slowly keeps nobody out.

    Args:
        max_stay_s: how long interactive requests may stay, as far as can be told.
        max_batch_stay_s: how long batch jobs may.
    """

    def __init__(self, app: ASGIApp, max_stay_s: float, max_batch_stay_s: float) -> None:
        self.app = app
        self._interactive, self._batch = Crowd(max_stay_s), Crowd(max_batch_stay_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or scope["path"].rpartition("/")[2] not in TASKS:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        priority = headers.get(PRIORITY_HEADER, "").strip().lower()
        crowd = self._batch if priority == "batch" else self._interactive
        if crowd.is_full():
            scope["albert_serve.request_id"] = find_or_make_id(headers)
            await error_response(_full(crowd), scope)(scope, receive, send)
        else:
            await self._pass(crowd, scope, receive, send)

    async def _pass(self, crowd: Crowd, scope: Scope, receive: Receive, send: Send) -> None:
        entered = False

        async def read() -> Message:
            nonlocal entered
            message = await receive()
            if not entered and not message.get("more_body"):
                entered = True
                crowd.enter()
            return message

        try:
            await self.app(scope, read, send)
        finally:
            if entered:
                crowd.leave()


def _full(crowd: Crowd) -> QueueFullError:
    return QueueFullError(
        f"{crowd.num_inside} requests are being answered, which takes {crowd.stay_s:.2g} s; "
        f"{crowd.most} are taken at once; try again later",
        retry_after_s=max(1.0, crowd.stay_s),
    )
