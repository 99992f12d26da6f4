"""Admission control of HTTP requests: 429 over a concurrency limit, before anything is read.

The rules and the limits are in `batching/admission.py`; here the first of them meets a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.batching.admission import ConcurrencyLimiter, RefusalPacer
from albert_serve.batching.scheduler import PRIORITIES, Priority
from albert_serve.errors import QueueFullError
from albert_serve.server.auth import PRIORITY_HEADER
from albert_serve.server.error_replies import error_response
from albert_serve.server.logging import RepeatedWarning
from albert_serve.server.paths import Target, target_of

_REFUSAL: Final = "albert_serve.refusal"
_PRIORITY: Final = "albert_serve.priority"
_logger = logging.getLogger(__name__)


def priority_of(scope: Scope) -> Priority | None:
    """Return the priority of a request, which is read at the first call; None if there is none."""
    if _PRIORITY not in scope:
        text = Headers(scope=scope).get(PRIORITY_HEADER, PRIORITIES[0]).strip().lower()
        scope[_PRIORITY] = next((name for name in PRIORITIES if name == text), None)
    priority: Priority | None = scope[_PRIORITY]
    return priority


class TaskDirectory(Protocol):
    """The models and tasks that requests may name."""

    def find_task(self, target: Target) -> tuple[str, str] | None:
        """Return the names of a target's model and task; None if it is no task that there is."""
        ...

    def count_refusal(self, model: str, task: str) -> None:
        """Count a refused request."""
        ...


class AdmissionController:
    """Outermost ASGI middleware: answers 429 over the concurrency limit.

    Each model has a limit for interactive requests and one for batch jobs.

    Args:
        directory: returns the tasks that are limited; None while the service starts.
        max_latency_s: the bound on the expected latency of interactive requests.
        max_batch_latency_s: the same for batch jobs.
        around_refusals: middleware that is applied to refusals only.
    """

    def __init__(
        self,
        app: ASGIApp,
        directory: Callable[[], TaskDirectory | None],
        max_latency_s: float,
        max_batch_latency_s: float,
        around_refusals: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:
        self.app = app
        self._refuse = around_refusals(_refuse) if around_refusals else _refuse
        self._directory = directory
        self._max_latencies_s: dict[bool, float] = {False: max_latency_s, True: max_batch_latency_s}
        self._limiters: dict[tuple[str, bool], ConcurrencyLimiter] = {}
        self._pacer = RefusalPacer()
        self._refusals = RepeatedWarning(_logger, "%d requests refused, the last to model %s")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        directory = self._directory()
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        names = directory.find_task(target_of(scope)) if directory and is_post else None
        if directory is None or names is None:
            await self.app(scope, receive, send)
            return
        model, task = names
        limiter = self._limiter(model, priority_of(scope) == "batch")

        def refuse() -> QueueFullError:
            directory.count_refusal(model, task)
            self._refusals.log(model)
            return limiter.refuse()

        if limiter.is_full():
            scope[_REFUSAL] = refuse()
            await self._pacer.wait()
            await self._refuse(scope, receive, send)
            return
        slot = _Slot(limiter, refuse, receive, send)
        try:
            await self.app(scope, slot.receive, slot.send)
        finally:
            slot.release(None)

    def _limiter(self, model: str, is_batch: bool) -> ConcurrencyLimiter:
        limiter = self._limiters.get((model, is_batch))
        if limiter is None:
            limiter = self._limiters[model, is_batch] = ConcurrencyLimiter(
                self._max_latencies_s[is_batch]
            )
        return limiter


class _Slot:
    """The slot of an admitted request: from the end of its body to the start of its reply.

    So slow clients do not use up the limit. Until the application begins to read the slot is
    taken, too: BentoML's middleware continues in another iteration of the event loop, and all
    requests of the same iteration would find the limit not reached.
    """

    def __init__(
        self,
        limiter: ConcurrencyLimiter,
        refuse: Callable[[], QueueFullError],
        receive: Receive,
        send: Send,
    ) -> None:
        self._limiter = limiter
        self._refuse = refuse
        self._receive = receive
        self._send = send
        self._is_begun = False
        self._is_read = False
        self._state: Literal["taken", "paused", "released"] = "taken"
        limiter.admit()

    async def receive(self) -> Message:
        """Receive the next message of the request.

        Raises:
            QueueFullError: the body arrived slowly, and now the limit is far exceeded.
        """
        self._is_begun = True
        if self._is_read or self._state == "released":
            return await self._receive()
        if self._state == "taken":
            self._state = "paused"
            self._limiter.pause()
        message = await self._receive()  # does not suspend if the body is there
        self._is_read = not message.get("more_body")
        if self._is_read and self._state == "paused":
            if self._limiter.is_exceeded():
                raise self._refuse()
            self._state = "taken"
            self._limiter.resume()
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the reply."""
        if message["type"] == "http.response.start":
            self.release(message["status"])
        await self._send(message)

    def release(self, status: int | None) -> None:
        """Release the slot, by the status of the reply; None if there is none."""
        if self._state == "taken":
            if self._is_begun:
                self._limiter.release(status)
            else:  # 401 or 415, which tell nothing of the throughput
                self._limiter.pause()
        self._state = "released"


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(scope[_REFUSAL], scope)(scope, receive, send)
