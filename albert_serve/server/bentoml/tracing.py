"""OpenTelemetry spans, only for requests whose spans are used.

BentoML makes spans for every request, even without an exporter; that is half of the latency that
it adds (docs/decisions.md).
"""

from __future__ import annotations

from typing import Any, Final

from bentoml._internal.configuration.containers import BentoMLContainer
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

_PARENT: Final = b"traceparent"


class _TracedRequestsOnly:
    """ASGI middleware that applies OpenTelemetry's to requests with a `traceparent` only."""

    def __init__(self, app: ASGIApp, *args: Any, **options: Any) -> None:
        self.app = app
        self._traced = OpenTelemetryMiddleware(app, *args, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with a span if the caller traces it."""
        is_traced = any(name == _PARENT for name, _ in scope.get("headers", ()))
        await (self._traced if is_traced else self.app)(scope, receive, send)


def limit_tracing(app: Starlette) -> None:
    """Without an exporter, make spans only for traced requests, whose trace id is logged.

    Args:
        app: BentoML's application, before its first request.
    """
    if BentoMLContainer.config.tracing.exporter_type.get() is not None:
        return
    app.user_middleware = [
        Middleware(_TracedRequestsOnly, *middleware.args, **middleware.kwargs)
        if isinstance(middleware.cls, type) and issubclass(middleware.cls, OpenTelemetryMiddleware)
        else middleware
        for middleware in app.user_middleware
    ]
