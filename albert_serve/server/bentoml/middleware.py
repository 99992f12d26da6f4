"""The order of all middleware, some of which replaces BentoML's."""

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
    """Return the middleware of a process, outermost first.

    Call this after BentoML has read its configuration and before the first request.

    Args:
        bentomls: BentoML's middleware.
        find: function that returns the limits and the task of a target, or None for other targets.
        is_main: whether our routes answer instead of BentoML's endpoints.
    """
    parts: list[Middleware] = []
    if settings.cors_origins:
        # CORS is outside admission, so that web pages can read the rejections.
        parts.append(Middleware(CORSMiddleware, **cors_options(settings)))
    # Admission precedes everything that takes time, because rejections must be cheap.
    parts.append(Middleware(AdmissionControl, find=find))
    # BentoML measures and, if there is an exporter, traces all admitted requests.
    parts += _adapt(bentomls, is_main=is_main)
    if is_main:
        # From here on, requests get an id and a log line, and errors get our replies.
        parts.append(Middleware(ErrorReplies))
        if settings.allowed_hosts and "*" not in settings.allowed_hosts:
            # Hosts precede keys, so that a page with a forged name learns nothing about the keys.
            parts.append(Middleware(AllowedHosts, hosts=settings.allowed_hosts))
    if settings.has_keys:
        # Keys are checked before the routes, so that no body is read without a key.
        hashes = read_keys(settings.api_keys, settings.api_keys_file)
        parts.append(Middleware(ApiKeyMiddleware, hashes=hashes, surfaces=settings.guard))
    return parts


def _adapt(bentomls: Sequence[Middleware], *, is_main: bool) -> list[Middleware]:
    """Return BentoML's middleware without unused parts, and with metrics only for known paths.

    Our requests have a deadline, but BentoML's timeout keeps a timer and a task for a minute after
    each reply. Spans take time even without an exporter. Only BentoML's endpoints read the context.
    """
    unused: set[Any] = {TimeoutMiddleware}
    if BentoMLContainer.config.tracing.exporter_type.get() is None:
        unused.add(OpenTelemetryMiddleware)
    if is_main:
        unused.add(ContextMiddleware)
    metrics: Any = RunnerTrafficMetricsMiddleware
    replacement: Any = _MetricsOfKnownPaths
    return [
        Middleware(replacement, **part.kwargs) if part.cls is metrics else part
        for part in bentomls
        if part.cls not in unused
    ]


class _MetricsOfKnownPaths:
    """BentoML's HTTP metrics, with one label for all unknown paths."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        self._metrics = RunnerTrafficMetricsMiddleware(self._pass_on, **options)
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request with the label of its path."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        labelled = {**scope, "path": target_of(scope).label, _SCOPE: scope}
        await self._metrics(labelled, receive, send)

    async def _pass_on(self, labelled: Scope, receive: Receive, send: Send) -> None:
        await self.app(labelled[_SCOPE], receive, send)
