"""BentoML's own middleware: parts of it are replaced or left out."""

from __future__ import annotations

from typing import Any, Final

from _bentoml_impl.server.app import ContextMiddleware
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.server.http.instruments import RunnerTrafficMetricsMiddleware
from bentoml._internal.server.http.traffic import TimeoutMiddleware
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from albert_serve.server.paths import target_of

_SCOPE: Final = "albert_serve.scope"


def adapt_middleware(app: Starlette, *, is_main: bool) -> None:
    """Remove middleware of BentoML that our routes do not use; limit its metrics to known paths.

    The timeout keeps a timer and a task for a minute after each reply, and our requests have a
    deadline. Spans are made for every request, even without an exporter. The context is read only
    by BentoML's own endpoints. Call this before the first request, and after BentoML has read its
    configuration.

    Args:
        is_main: whether our routes answer, instead of BentoML's endpoints.
    """
    metrics: Any = RunnerTrafficMetricsMiddleware
    ours: Any = _MetricsOfKnownPaths
    unused: set[Any] = {TimeoutMiddleware}
    if BentoMLContainer.config.tracing.exporter_type.get() is None:
        unused.add(OpenTelemetryMiddleware)
    if is_main:
        unused.add(ContextMiddleware)
    app.user_middleware = [
        Middleware(ours, **part.kwargs) if part.cls is metrics else part
        for part in app.user_middleware
        if part.cls not in unused
    ]


class _MetricsOfKnownPaths:
    """BentoML's HTTP metrics, which would have a label for any path that a caller invents."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        self._metrics = RunnerTrafficMetricsMiddleware(self._pass_on, **options)
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request by the label of its path."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        labelled = {**scope, "path": target_of(scope).label, _SCOPE: scope}
        await self._metrics(labelled, receive, send)

    async def _pass_on(self, labelled: Scope, receive: Receive, send: Send) -> None:
        await self.app(labelled[_SCOPE], receive, send)
