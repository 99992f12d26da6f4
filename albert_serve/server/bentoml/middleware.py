"""The order of all middleware; parts of BentoML's own are replaced or left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from _bentoml_impl.server.app import ContextMiddleware
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.server.http.instruments import RunnerTrafficMetricsMiddleware
from bentoml._internal.server.http.traffic import TimeoutMiddleware
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from albert_serve.server.auth import AllowedHosts, ApiKeyMiddleware, cors_options, read_keys
from albert_serve.server.errors import ErrorReplies
from albert_serve.server.limits import AdmissionControl, Limits
from albert_serve.server.paths import RequestTarget, target_of
from albert_serve.settings import Settings

_SCOPE: Final = "albert_serve.scope"


def order_middleware(
    bentomls: Sequence[Middleware],
    settings: Settings,
    find: Callable[[RequestTarget], tuple[Limits, str] | None],
    *,
    is_main: bool,
) -> list[Middleware]:
    """Return the middleware of a process, the outermost first.

    Call this before the first request, and after BentoML has read its configuration.

    Args:
        is_main: whether our routes answer, instead of BentoML's endpoints.
    """
    parts: list[Middleware] = []
    if settings.cors_origins:
        # Outside of admission, so that pages can read its refusals.
        parts.append(Middleware(CORSMiddleware, **cors_options(settings)))
    # Before all that costs time, because rejections must be cheap.
    parts.append(Middleware(AdmissionControl, find=find))
    # BentoML's metrics and, where they are exported, traces: of all that was admitted.
    parts += _adapted(bentomls, is_main=is_main)
    if is_main:
        # An id, a log line and our error replies for all that is inside.
        parts.append(Middleware(ErrorReplies))
        if settings.allowed_hosts and "*" not in settings.allowed_hosts:
            # Before the keys, so that a page with a forged name learns nothing of them.
            parts.append(Middleware(AllowedHosts, hosts=settings.allowed_hosts))
    if settings.has_keys:
        # The last before the routes, which read no body without a key.
        hashes = read_keys(settings.api_keys, settings.api_keys_file)
        parts.append(Middleware(ApiKeyMiddleware, hashes=hashes, surfaces=settings.guard))
    return parts


def _adapted(bentomls: Sequence[Middleware], *, is_main: bool) -> list[Middleware]:
    """Return BentoML's middleware without what our routes do not use; its metrics of known paths.

    The timeout keeps a timer and a task for a minute after each reply, and our requests have a
    deadline. Spans are made for every request, even without an exporter. The context is read only
    by BentoML's own endpoints.
    """
    unused: set[Any] = {TimeoutMiddleware}
    if BentoMLContainer.config.tracing.exporter_type.get() is None:
        unused.add(OpenTelemetryMiddleware)
    if is_main:
        unused.add(ContextMiddleware)
    metrics: Any = RunnerTrafficMetricsMiddleware
    ours: Any = _MetricsOfKnownPaths
    return [
        Middleware(ours, **part.kwargs) if part.cls is metrics else part
        for part in bentomls
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
