"""The routes of the service: a request of a task in, through tokenizer and batcher, its reply out.

A Starlette application that `service.py` mounts under BentoML.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import pydantic_core
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from albert_serve import __version__
from albert_serve.access import PRIORITY_HEADER
from albert_serve.batcher import Batcher
from albert_serve.bundle import Bundle
from albert_serve.envelope import error_response, id_header, read_json, request_id_of
from albert_serve.errors import (
    AlbertServeError,
    InvalidInputError,
    NotFoundError,
    NotReadyError,
    TooMuchAtOnceError,
)
from albert_serve.scheduling import PRIORITIES, Priority
from albert_serve.schemas import (
    TRUNCATED_HEADER,
    WARNINGS_HEADER,
    InfoReply,
    TaskInfo,
    TaskRequest,
    describe,
)
from albert_serve.settings import Settings
from albert_serve.tasks import TASKS, AnyTask, Prepared, Work, prepare_request, shape_reply
from albert_serve.web import page_routes

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
# What nginx logs for it; nobody is there to read the reply.
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


@dataclass(kw_only=True, slots=True)
class Backend:
    """What the routes stand on, for as long as the process serves.

    Attributes:
        tasks: the logic of each task that the bundle has, by endpoint name.
        accepting: False from the moment that the process is told to end.
    """

    settings: Settings
    bundle: Bundle
    tasks: dict[str, AnyTask]
    batcher: Batcher
    accepting: bool = True

    async def answer(
        self, name: str, given: TaskRequest, ends_s: float, priority: Priority
    ) -> Response:
        """The reply to a valid request.

        Args:
            ends_s: when the deadline is, on `time.monotonic`'s clock.

        Raises:
            InvalidInputError: an item cannot be answered; for a list the message has its index.
            RequestError: the queue is full, or the deadline has passed.
            EngineError: the model failed.
        """
        # Off the event loop: a request's texts may be megabytes.
        prepared = await asyncio.to_thread(self._prepare, name, given)
        work = Work(prepared)
        while work.inputs:  # one round, but where the next inputs depend on these answers
            logits = await self.batcher.run(
                work.inputs, ends_s - time.monotonic(), priority=priority
            )
            await asyncio.to_thread(work.take, logits)
        body = pydantic_core.to_json(shape_reply(given, work.answers))
        return Response(body, headers=_notes(prepared), media_type="application/json")

    def _prepare(self, name: str, given: TaskRequest) -> list[Prepared[Any]]:
        if isinstance(given.inputs, list) and len(given.inputs) > self.settings.max_items:
            raise TooMuchAtOnceError(
                f"inputs holds {len(given.inputs)} items; at most {self.settings.max_items} are "
                "taken at once: split the list"
            )
        return prepare_request(self.tasks[name], given)

    def info(self) -> InfoReply:
        """What is served, and the limits."""
        entries = self.bundle.manifest.tasks
        return InfoReply(
            model_id=self.bundle.folder.resolve().name,
            version=__version__,
            precision=self.bundle.manifest.precision,
            tasks=[
                TaskInfo(name=name, labels=entry.labels, problem_type=entry.problem_type)
                for name, entry in entries.items()
                if name in self.tasks
            ],
            max_positions=self.bundle.config.max_positions,
            mask_token="[MASK]",  # noqa: S106  # not that kind of token
            max_items=self.settings.max_items,
            max_body_bytes=self.settings.max_body_bytes,
            needs_key=self.settings.has_keys and "api" in self.settings.guard,
        )


def make_app(openapi: Callable[[], dict[str, Any]]) -> Starlette:
    """The application; `app.state.backend` is to be set to a `Backend` before the first request.

    Args:
        openapi: gives the OpenAPI document.
    """
    app = Starlette(
        routes=[
            *(
                Route(f"/{name}", _enveloped(functools.partial(_task, name)), methods=["POST"])
                for name in TASKS
            ),
            Route("/info", _enveloped(_info)),
            Route("/health", _enveloped(_health)),
            # `/` in place of BentoML's page there, which loads a tracker.
            *page_routes(),
            Route("/docs", _docs),
            Route("/docs.json", functools.partial(_docs_json, openapi)),
        ]
    )
    app.state.backend = None
    return app


def _enveloped(handler: Handler) -> Handler:
    """The handler, with its errors answered instead of raised."""

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
    backend = _backend(request)
    if name not in backend.tasks:
        there = ", ".join(backend.tasks)
        raise NotFoundError(f"the model served here has no {name}; it has {there}")
    settings = backend.settings
    priority = _priority(request)
    ends_s = time.monotonic() + settings.deadline_s
    body = await read_json(
        request, max_bytes=settings.max_body_bytes, deadline_s=settings.deadline_s
    )
    try:
        given = TASKS[name].request.model_validate(body)
    except ValidationError as error:
        raise InvalidInputError(describe(error)) from error
    return await _unless_gone(request, backend.answer(name, given, ends_s, priority))


def _priority(request: Request) -> Priority:
    given = request.headers.get(PRIORITY_HEADER, "interactive").strip().lower()
    for priority in PRIORITIES:
        if given == priority:
            return priority
    raise InvalidInputError(
        f"the header {PRIORITY_HEADER} is {given[:40]!r}; allowed are {' and '.join(PRIORITIES)}"
    )


async def _info(request: Request) -> Response:
    return Response(_backend(request).info().model_dump_json(), media_type="application/json")


async def _health(request: Request) -> Response:
    if not _backend(request).accepting:
        raise NotReadyError("the service is shutting down")
    return JSONResponse({"status": "ok"})


async def _docs(_request: Request) -> Response:
    return HTMLResponse(_DOCS_PAGE)


async def _docs_json(openapi: Callable[[], dict[str, Any]], _request: Request) -> Response:
    return JSONResponse(openapi())


def _backend(request: Request) -> Backend:
    backend: Backend | None = request.app.state.backend
    if backend is None:
        raise NotReadyError("the service is starting")
    return backend


def _notes(prepared: Sequence[Prepared[Any]]) -> dict[str, str]:
    """Headers for what the reply's format has no room for."""
    warnings = list(dict.fromkeys(text for item in prepared for text in item.warnings))
    num_truncated = sum(item.num_truncated for item in prepared)
    notes = {WARNINGS_HEADER: json.dumps(warnings)} if warnings else {}
    return {**notes, TRUNCATED_HEADER: str(num_truncated)} if num_truncated else notes


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of `work`, which is dropped as soon as the client closes its connection."""
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
