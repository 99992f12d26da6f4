"""BentoML's own documents, at less cost: the schema is made once, metrics one at a time.

Each takes some 10 ms of Python, which everybody waits for; BentoML makes them for every request,
and metrics in up to 40 threads at once.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

from bentoml._internal.configuration.containers import BentoMLContainer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from albert_serve.server.paths import METRICS_PATH


def share_documents(app: Starlette, service: Any) -> None:
    """Replace BentoML's routes of these documents, where it has them.

    Args:
        service: BentoML's.
    """
    rendering = asyncio.Lock()

    @cache
    def make_schema() -> bytes:
        return json.dumps(service.schema()).encode()

    async def schema(_: Request) -> Response:
        return Response(make_schema(), media_type="application/json")

    async def metrics(_: Request) -> Response:
        client = BentoMLContainer.metrics_client.get()
        async with rendering:
            text = await asyncio.to_thread(client.generate_latest)
        return Response(text, media_type=client.CONTENT_TYPE_LATEST)

    endpoints = {"/schema.json": schema, METRICS_PATH: metrics}
    app.router.routes = [
        Route(path, endpoints[path])
        if isinstance(route, Route) and (path := route.path) in endpoints
        else route
        for route in app.router.routes
    ]
