"""The gate in front of every request: 429 over a concurrency limit, before anything is read.

The rules and the limits are in `batching/admission.py`; here the first of them meets a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.batching.admission import ConcurrencyLimiter, RefusalPacer
from albert_serve.batching.scheduler import PRIORITIES, Priority
from albert_serve.server.auth import PRIORITY_HEADER
from albert_serve.server.error_replies import error_response
from albert_serve.server.logging import RepeatedWarning
from albert_serve.server.models.registry import Models
from albert_serve.server.paths import target_of
from albert_serve.settings import Settings

_logger = logging.getLogger(__name__)


def priority_of(headers: Headers) -> Priority | None:
    """Return the priority of a request; None if it names one that there is not."""
    text = headers.get(PRIORITY_HEADER, PRIORITIES[0]).strip().lower()
    return next((name for name in PRIORITIES if name == text), None)


class ConcurrencyGate:
    """ASGI middleware that answers 429 over the concurrency limit.

    Each model has a limit for interactive requests and one for batch jobs. Outside of BentoML's
    middleware, because refusals must be cheap; and since that keeps a metric for each path, it sees
    the path's label, until `ErrorReplies` restores the path.

    Args:
        models: returns the hosted models; None while the service starts.
    """

    def __init__(
        self, app: ASGIApp, models: Callable[[], Models | None], settings: Settings
    ) -> None:
        self.app = app
        self._models = models
        # By whether it is of batch jobs.
        self._max_latencies_s = {False: settings.max_wait_s, True: settings.deadline_s / 2}
        self._limiters: dict[tuple[str, bool], ConcurrencyLimiter] = {}
        self._pacer = RefusalPacer()
        self._refusals = RepeatedWarning(_logger, "%d requests refused, the last to model %s")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        target, models = target_of(scope), self._models()
        scope["path"] = target.label
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        names = models.find_task(target) if models is not None and is_post else None
        if models is None or names is None:
            await self.app(scope, receive, send)
            return
        model, task = names
        limiter = self._limiter(model, priority_of(Headers(scope=scope)) == "batch")
        if limiter.is_full():
            models.count_refusal(model, task)
            self._refusals.log(model)
            refusal = error_response(limiter.refuse(), scope)
            await self._pacer.wait()
            await refusal(scope, receive, send)
            return
        slot = _Slot(limiter, receive, send)
        try:
            await self.app(scope, slot.receive, slot.send)
        finally:
            slot.release(None)

    def _limiter(self, model: str, is_batch: bool) -> ConcurrencyLimiter:
        key = (model, is_batch)
        if key not in self._limiters:
            self._limiters[key] = ConcurrencyLimiter(self._max_latencies_s[is_batch])
        return self._limiters[key]


class _Slot:
    """The slot of an admitted request: from the end of its body to the start of its reply.

    So slow clients do not use up the limit. Until the application begins to read the slot is
    taken, too: requests that arrive together would all find the limit not reached.
    """

    def __init__(self, limiter: ConcurrencyLimiter, receive: Receive, send: Send) -> None:
        self._limiter = limiter
        self._receive = receive
        self._send = send
        self._is_counted = True
        self._is_read = False
        limiter.admit()

    async def receive(self) -> Message:
        """Receive the next message of the request."""
        if self._is_read:
            return await self._receive()
        if self._is_counted:
            self._is_counted = False
            self._limiter.pause()
        message = await self._receive()  # does not suspend if the body is there
        if not self._is_read and not message.get("more_body"):
            self._is_read = self._is_counted = True
            self._limiter.resume()
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the reply."""
        if message["type"] == "http.response.start":
            self.release(message["status"])
        await self._send(message)

    def release(self, status: int | None) -> None:
        """Release the slot, by the status of the reply; None if there is none."""
        if self._is_counted and self._is_read:
            self._limiter.release(status)
        elif self._is_counted:  # 401 or 415, which tell nothing of the throughput
            self._limiter.pause()
        self._is_counted = False
        self._is_read = True  # what comes of the body now is not counted
