"""BentoML's own documents, at less cost: the schema is made once, metrics one at a time.

Each takes some 10 ms of Python, which everybody waits for; BentoML makes them for every request,
and metrics in up to 40 threads at once.
"""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from bentoml._internal.configuration.containers import BentoMLContainer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from albert_serve.server.paths import METRICS_PATH


def fixed_routes(service: Any) -> list[Route]:
    """Return the routes that go before BentoML's.

    Args:
        service: BentoML's.
    """
    rendering = asyncio.Lock()

    @cache
    def make_schema() -> bytes:
        return JSONResponse(service.schema()).body

    async def schema(_: Request) -> Response:
        return Response(make_schema(), media_type="application/json")

    async def metrics(_: Request) -> Response:
        client = BentoMLContainer.metrics_client.get()
        async with rendering:
            text = await asyncio.to_thread(client.generate_latest)
        return Response(text, media_type=client.CONTENT_TYPE_LATEST)

    return [Route("/schema.json", schema), Route(METRICS_PATH, metrics)]
