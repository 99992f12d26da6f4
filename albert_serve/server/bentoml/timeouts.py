"""BentoML's timeout of requests, which is left out: each request has a deadline of this service."""

from __future__ import annotations

from typing import Any

from bentoml._internal.server.http.traffic import TimeoutMiddleware
from starlette.applications import Starlette


def leave_timeouts_out(app: Starlette) -> None:
    """Remove BentoML's timeout, which keeps a timer for a minute after each reply, and a task.

    Its configuration takes no service without a timeout. Call it before the first request.
    """
    timeout: Any = TimeoutMiddleware
    app.user_middleware = [each for each in app.user_middleware if each.cls is not timeout]
