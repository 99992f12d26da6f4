"""Requests of a task are answered here, those of BentoML's endpoints and of the mounted routes."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, Final

import pydantic_core
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from albert_serve.api.schemas import TRUNCATED_HEADER, WARNINGS_HEADER, TaskRequest, describe
from albert_serve.batching.scheduler import PRIORITIES, Priority
from albert_serve.errors import AlbertServeError, InvalidInputError, NotFoundError
from albert_serve.server.admission import priority_of
from albert_serve.server.auth import PRIORITY_HEADER
from albert_serve.server.error_replies import error_response, id_header, read_json, request_id_of
from albert_serve.server.hosted_model import HostedModel
from albert_serve.tasks import TASKS, Prepared

# nginx's status for a client that disconnected; only the log shows it.
_CLIENT_GONE: Final = 499
_logger = logging.getLogger(__name__)


async def answer_request(model: HostedModel, task: str, request: Request) -> Response:
    """Answer a request of a task, whose body is read here: no more of it than the limit.

    Raises:
        RequestError: the request cannot be answered.
        EngineError: the model failed.
    """
    _check_task(model, task)
    settings = model.settings
    priority = _priority(request)
    ends_s = time.monotonic() + settings.deadline_s
    with model.in_use():
        body = await read_json(
            request, max_bytes=settings.max_body_bytes, deadline_s=settings.deadline_s
        )
        task_request = _parse(model, task, body)
        answering = model.answer(task, task_request, ends_s, priority, pydantic_core.to_json)
        return await _until_disconnect(request, _reply(answering))


async def answer_call(model: HostedModel, task: str, inputs: Any, parameters: Any) -> Any:
    """Answer a call from Python with the values that a request has; return the reply's value.

    Raises:
        RequestError: the call cannot be answered.
        EngineError: the model failed.
    """
    _check_task(model, task)
    ends_s = time.monotonic() + model.settings.deadline_s
    request = _parse(model, task, {"inputs": inputs, "parameters": parameters})
    with model.in_use():
        _, reply = await model.answer(task, request, ends_s, "interactive", lambda value: value)
    return reply


def reply_to_error(error: AlbertServeError, request: Request) -> Response:
    """Return the error reply; errors of the service itself are logged."""
    if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _logger.error("request %s failed", request_id_of(request.scope), exc_info=error)
    return error_response(error, request.scope)


def _parse(model: HostedModel, task: str, body: Any) -> TaskRequest:
    """Return the request of a task; a list of too many inputs is refused before it is validated."""
    if isinstance(body, dict):
        model.check_num_items(body.get("inputs"))
    try:
        return TASKS[task].request.model_validate(body)
    except ValidationError as error:
        raise InvalidInputError(describe(error)) from error


def _check_task(model: HostedModel, task: str) -> None:
    if task not in model.tasks:
        tasks = ", ".join(model.tasks)
        raise NotFoundError(f"the model {model.name} has no {task}; it has {tasks}")


async def _reply(answering: Awaitable[tuple[Sequence[Prepared[Any]], bytes]]) -> Response:
    prepared, body = await answering
    return Response(body, headers=_note_headers(prepared), media_type="application/json")


def _priority(request: Request) -> Priority:
    priority = priority_of(request.scope)
    if priority is None:
        value = request.headers[PRIORITY_HEADER][:40]
        raise InvalidInputError(
            f"the header {PRIORITY_HEADER} is {value!r}; allowed are {' and '.join(PRIORITIES)}"
        )
    return priority


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
        # An exception's traceback holds this frame, and `working` the exception: without this
        # cycle a refused request's memory is free at once.
        del working


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
