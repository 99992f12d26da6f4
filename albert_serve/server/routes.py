"""The routes of the service, in a Starlette application that `service.py` uses."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from albert_serve.api.schemas import MODEL_PATH, MODELS_PATH, ModelsReply
from albert_serve.api.zero_shot import ZERO_SHOT
from albert_serve.errors import NotFoundError, NotReadyError
from albert_serve.server.errors import EXCEPTION_HANDLERS, JSON
from albert_serve.server.handlers import answer_request, check_media_type
from albert_serve.server.models import HostedModel, Models
from albert_serve.server.paths import DEFAULT_PATHS
from albert_serve.tasks import TASKS
from albert_serve.web import API_PAGE_HEADERS, page_routes

_DOCS_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>albert_serve: API</title>
<link rel="stylesheet" href="./static_content/swagger-ui.css"></head>
<body><div id="swagger-ui"></div>
<script src="./static_content/swagger-ui-bundle.js"></script>
<script src="./static_content/swagger-ui-standalone-preset.js"></script>
<script src="./static_content/swagger-initializer.js"></script></body></html>
"""


def make_app(openapi: Callable[[], dict[str, Any]]) -> Starlette:
    """Return the application, which answers 503 until `app.state.models` is set.

    Args:
        openapi: function that returns the OpenAPI document, and is called only once.
    """

    @functools.cache
    def document() -> bytes:
        return json.dumps(openapi()).encode()

    async def docs_json(_: Request) -> Response:
        return Response(document(), media_type=JSON)

    app = Starlette(
        routes=[
            *(
                Route(path, functools.partial(_answer, name), methods=["POST"])
                for name, default_path in DEFAULT_PATHS.items()
                for path in (default_path, f"{MODEL_PATH}/{name}")
            ),
            Route(MODELS_PATH, _list),
            Route(MODEL_PATH, _info),
            # BentoML's clients call the method `info` by POST.
            Route("/info", _info, methods=["GET", "POST"]),
            Route(f"{MODEL_PATH}/info", _info),
            *(Route(f"{prefix}/health", _health) for prefix in ("", MODEL_PATH)),
            # `/` replaces BentoML's page, which loads a tracker.
            *page_routes(),
            *(Route(path, _name_tasks, methods=["POST"]) for path in ("/", MODEL_PATH)),
            Route("/docs", _docs),
            *(Route(path, docs_json) for path in ("/docs.json", "/openapi.json")),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.models = None
    return app


async def _answer(endpoint: str, request: Request) -> Response:
    return await answer_request(_model(request), endpoint, request)


async def _list(request: Request) -> Response:
    models = _models(request)
    described = [model.description for model in models.served.values()]
    # In `data`, pydantic writes only the fields of the declared type.
    reply = ModelsReply(data=[*described], default=models.default_name, models=described)
    return Response(reply.model_dump_json(), media_type=JSON)


async def _info(request: Request) -> Response:
    if request.method == "POST" and "content-type" in request.headers:
        check_media_type(request.headers)
    return Response(_model(request).info_json, media_type=JSON)


async def _health(request: Request) -> Response:
    _model(request)
    if not _models(request).accepting:
        raise NotReadyError("The service is shutting down. Send the request to a replica.")
    return JSONResponse({"status": "ok"})


async def _name_tasks(request: Request) -> Response:
    """Reject a request without a task, which Hugging Face's clients send to a base URL."""
    _model(request)
    url = str(request.url.replace(query="")).rstrip("/")
    addresses = ", ".join(f"{url}/{name}" for name in (*TASKS, ZERO_SHOT))
    raise NotFoundError(f"This is not the address of a task. Use one of {addresses}.")


async def _docs(_request: Request) -> Response:
    return HTMLResponse(_DOCS_PAGE, headers=API_PAGE_HEADERS)


def _models(request: Request) -> Models:
    models: Models | None = request.app.state.models
    if models is None:
        raise NotReadyError("The service is starting. Try again later.")
    return models


def _model(request: Request) -> HostedModel:
    return _models(request).get(request.path_params.get("model"))
