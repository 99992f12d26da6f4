"""The concurrency limit: 429 to requests above it, before their bodies are read.

Reading, validating and tokenising a request costs far more than rejecting it. So the limit of the
queue (batching/queue.py), which applies to parsed requests, is not enough under overload.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.errors import QueueFullError
from albert_serve.server.error_replies import error_response
from albert_serve.server.logging import RepeatedWarning
from albert_serve.server.models.registry import Models
from albert_serve.server.paths import target_of

_logger = logging.getLogger(__name__)


class ConcurrencyGate:
    """ASGI middleware that answers 429 above the concurrency limit of a model.

    It is outside of BentoML's middleware, because rejections must be cheap.

    Args:
        models: returns the hosted models; None while the service starts.
        limit: requests in progress per model.
    """

    def __init__(self, app: ASGIApp, models: Callable[[], Models | None], limit: int) -> None:
        self.app = app
        self._models = models
        self._limit = limit
        self._num_requests: Counter[str] = Counter()  # in progress, by model
        self._rejections = RepeatedWarning(_logger, "%d requests rejected, the last to model %s")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        models = self._models()
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        names = models.find_task(target_of(scope)) if models is not None and is_post else None
        if models is None or names is None:
            await self.app(scope, receive, send)
            return
        model, task = names
        num_requests = self._num_requests[model]
        if num_requests >= self._limit:
            models.count_refusal(model, task)
            self._rejections.log(model)
            error = QueueFullError(
                f"{num_requests} requests are in progress; the limit is {self._limit}. "
                "Try again later."
            )
            await error_response(error, scope)(scope, receive, send)
            return
        slot = _Slot(model, self._num_requests, receive, send)
        try:
            await self.app(scope, slot.receive, slot.send)
        finally:
            slot.release()


class _Slot:
    """The slot of an accepted request, from the end of its body to the start of its reply.

    So slow clients do not use up the limit. Until the application begins to read, the request has
    a slot, too: otherwise all requests that arrive together would find the limit not reached.
    """

    def __init__(
        self, model: str, num_requests: Counter[str], receive: Receive, send: Send
    ) -> None:
        self._model = model
        self._num_requests = num_requests
        self._receive = receive
        self._send = send
        self._is_counted = False
        self._is_read = False
        self._count()

    async def receive(self) -> Message:
        """Receive the next message of the request."""
        if self._is_read:
            return await self._receive()
        self.release()
        message = await self._receive()  # does not suspend if the body has arrived
        if not message.get("more_body"):
            self._is_read = True
            self._count()
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the reply."""
        if message["type"] == "http.response.start":
            self.release()
            self._is_read = True  # the rest of the body does not count
        await self._send(message)

    def release(self) -> None:
        """Release the slot, if the request has one."""
        self._num_requests[self._model] -= self._is_counted
        self._is_counted = False

    def _count(self) -> None:
        self._num_requests[self._model] += 1
        self._is_counted = True
