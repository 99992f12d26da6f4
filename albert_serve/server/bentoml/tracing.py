"""OpenTelemetry's spans, made where somebody gets to see them.

BentoML makes them for every request, whether or not they are sent anywhere; that is half of what
it adds to a request's time (docs/decisions.md).
"""

from __future__ import annotations

from typing import Any, Final

from bentoml._internal.configuration.containers import BentoMLContainer
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

_PARENT: Final = b"traceparent"


class _IfTraced:
    """ASGI middleware in place of OpenTelemetry's: that is passed by, but for a caller's trace."""

    def __init__(self, app: ASGIApp, *args: Any, **options: Any) -> None:
        self.app = app
        self._traced = OpenTelemetryMiddleware(app, *args, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with a span if it belongs to a trace."""
        is_traced = any(name == _PARENT for name, _ in scope.get("headers", ()))
        await (self._traced if is_traced else self.app)(scope, receive, send)


def trace_when_seen(app: Starlette) -> None:
    """Without an exporter, keep spans to requests whose caller traces: its id is for the log.

    Args:
        app: BentoML's, before its first request.
    """
    if BentoMLContainer.config.tracing.exporter_type.get() is not None:
        return
    app.user_middleware = [
        Middleware(_IfTraced, *each.args, **each.kwargs)
        if isinstance(each.cls, type) and issubclass(each.cls, OpenTelemetryMiddleware)
        else each
        for each in app.user_middleware
    ]
