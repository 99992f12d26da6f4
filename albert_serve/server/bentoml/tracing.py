"""OpenTelemetry: spans only where an exporter takes them, else only the caller's trace for the log.

BentoML makes spans for every request, even without an exporter; that is half of the latency that
it adds (docs/decisions.md).
"""

from __future__ import annotations

from typing import Final

from bentoml._internal.configuration.containers import BentoMLContainer
from opentelemetry import context, propagate
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

# BentoML's configuration by which it makes no span.
NO_SPANS: Final = {"excluded_urls": ".*"}


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
