"""BentoML's own middleware: what is left out of it, as each part costs every request some time."""

from __future__ import annotations

from typing import Any, Final

from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.server.http.traffic import TimeoutMiddleware
from opentelemetry import context, propagate
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

# BentoML's configuration by which it makes no span. It would make some for every request, even
# without an exporter; that is half of the latency that it adds (docs/decisions.md).
NO_SPANS: Final = {"excluded_urls": ".*"}


def leave_timeouts_out(app: Starlette) -> None:
    """Remove BentoML's timeout, which keeps a timer for a minute after each reply, and a task.

    Each request has a deadline of this service. BentoML's configuration takes no service without a
    timeout. Call it before the first request.
    """
    timeout: Any = TimeoutMiddleware
    app.user_middleware = [each for each in app.user_middleware if each.cls is not timeout]


def has_exporter() -> bool:
    """Whether BentoML's configuration, which must have been read, has an exporter of spans."""
    return BentoMLContainer.config.tracing.exporter_type.get() is not None


class CallersTrace:
    """ASGI middleware that makes the trace of the caller, if it names one, that of the log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on within the caller's trace."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if "traceparent" not in headers:
            await self.app(scope, receive, send)
            return
        token = context.attach(propagate.extract(headers))
        try:
            await self.app(scope, receive, send)
        finally:
            context.detach(token)
