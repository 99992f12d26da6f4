"""The routes of the service: a Starlette application that `service.py` mounts under BentoML."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from albert_serve.api.schemas import (
    MODEL_PATH,
    MODELS_PATH,
    TRUNCATED_HEADER,
    WARNINGS_HEADER,
    ModelsReply,
    describe,
)
from albert_serve.batching.scheduler import PRIORITIES, Priority
from albert_serve.errors import (
    AlbertServeError,
    InvalidInputError,
    NotFoundError,
    NotReadyError,
)
from albert_serve.server.auth import PRIORITY_HEADER
from albert_serve.server.error_replies import error_response, id_header, read_json, request_id_of
from albert_serve.server.hosted_model import HostedModel
from albert_serve.server.registry import Models
from albert_serve.tasks import TASKS, Prepared
from albert_serve.web import page_routes

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
# nginx's status for a client that disconnected; only the log shows it.
_CLIENT_GONE: Final = 499
_DOCS_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>albert_serve: API</title>
<link rel="stylesheet" href="./static_content/swagger-ui.css"></head>
<body><div id="swagger-ui"></div>
<script src="./static_content/swagger-ui-bundle.js"></script>
<script src="./static_content/swagger-ui-standalone-preset.js"></script>
<script src="./static_content/swagger-initializer.js"></script></body></html>
"""
_logger = logging.getLogger(__name__)


def make_app(openapi: Callable[[], dict[str, Any]]) -> Starlette:
    """Return the application; `app.state.models` must be set before the first request.

    Args:
        openapi: returns the OpenAPI document.
    """
    app = Starlette(
        routes=[
            *_model_routes(""),
            Route(MODELS_PATH, _with_error_replies(_list)),
            Route(MODEL_PATH, _with_error_replies(_info)),
            *_model_routes(MODEL_PATH),
            # `/` replaces BentoML's page, which loads a tracker.
            *page_routes(),
            Route("/docs", _docs),
            Route("/docs.json", functools.partial(_docs_json, openapi)),
        ]
    )
    app.state.models = None
    return app


def _model_routes(prefix: str) -> list[Route]:
    """Return the routes of a named model, or without a prefix of the default model."""
    tasks = [
        Route(
            f"{prefix}/{name}",
            _with_error_replies(functools.partial(_task, name)),
            methods=["POST"],
        )
        for name in TASKS
    ]
    return [
        *tasks,
        Route(f"{prefix}/info", _with_error_replies(_info)),
        Route(f"{prefix}/health", _with_error_replies(_health)),
    ]


def _with_error_replies(handler: Handler) -> Handler:
    """Wrap a handler so that it answers its errors instead of raising them."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except AlbertServeError as error:
            if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                _logger.exception("request %s failed", request_id_of(request.scope))
            return error_response(error, request.scope)

    return answer


async def _task(name: str, request: Request) -> Response:
    model = _model(request)
    if name not in model.tasks:
        tasks = ", ".join(model.tasks)
        raise NotFoundError(f"the model {model.name} has no {name}; it has {tasks}")
    settings = model.settings
    priority = _priority(request)
    ends_s = time.monotonic() + settings.deadline_s
    with model.in_use():
        body = await read_json(
            request, max_bytes=settings.max_body_bytes, deadline_s=settings.deadline_s
        )
        try:
            task_request = TASKS[name].request.model_validate(body)
        except ValidationError as error:
            raise InvalidInputError(describe(error)) from error
        work = _reply(model.answer(name, task_request, ends_s, priority))
        return await _until_disconnect(request, work)


async def _reply(answering: Awaitable[tuple[Sequence[Prepared[Any]], bytes]]) -> Response:
    prepared, body = await answering
    return Response(body, headers=_note_headers(prepared), media_type="application/json")


def _priority(request: Request) -> Priority:
    value = request.headers.get(PRIORITY_HEADER, "interactive").strip().lower()
    for priority in PRIORITIES:
        if value == priority:
            return priority
    raise InvalidInputError(
        f"the header {PRIORITY_HEADER} is {value[:40]!r}; allowed are {' and '.join(PRIORITIES)}"
    )


async def _list(request: Request) -> Response:
    models = _models(request)
    reply = ModelsReply(
        default=models.default.name,
        models=[models.get(name).info() for name in models.names],
    )
    return Response(reply.model_dump_json(), media_type="application/json")


async def _info(request: Request) -> Response:
    return Response(_model(request).info().model_dump_json(), media_type="application/json")


async def _health(request: Request) -> Response:
    _model(request)
    if not _models(request).accepting:
        raise NotReadyError("the service is shutting down")
    return JSONResponse({"status": "ok"})


async def _docs(_request: Request) -> Response:
    return HTMLResponse(_DOCS_PAGE)


async def _docs_json(openapi: Callable[[], dict[str, Any]], _request: Request) -> Response:
    return JSONResponse(openapi())


def _models(request: Request) -> Models:
    models: Models | None = request.app.state.models
    if models is None:
        raise NotReadyError("the service is starting")
    return models


def _model(request: Request) -> HostedModel:
    return _models(request).get(request.path_params.get("model"))


def _note_headers(prepared: Sequence[Prepared[Any]]) -> dict[str, str]:
    """Return headers for warnings and truncation, which the reply's format cannot express."""
    warnings = list(dict.fromkeys(text for item in prepared for text in item.warnings))
    num_truncated = sum(item.num_truncated for item in prepared)
    notes = {WARNINGS_HEADER: json.dumps(warnings)} if warnings else {}
    return {**notes, TRUNCATED_HEADER: str(num_truncated)} if num_truncated else notes


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the result of `work`, which is cancelled when the client disconnects."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=_CLIENT_GONE, headers=id_header(request.scope))
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait({working, gone})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
