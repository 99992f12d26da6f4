"""Task requests: read, prepared and answered, from HTTP and from BentoML's methods."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response

from albert_serve.api.schemas import TRUNCATED_HEADER, WARNINGS_HEADER, TaskRequest
from albert_serve.api.wire import validate
from albert_serve.errors import NotFoundError
from albert_serve.server.bodies import parse_json, read_body
from albert_serve.server.error_replies import JSON
from albert_serve.server.models.hosted_model import HostedModel
from albert_serve.tasks import TASKS, Prepared, Task

# nginx's status for a client that disconnected; only the log shows it.
_CLIENT_GONE: Final = 499


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRequest:
    """A request of a task in any wire format.

    Attributes:
        request: the request in Hugging Face's format.
        write: returns the reply's body, from the prepared items and the reply in Hugging Face's
            format.
        task: the task that answers; None for the model's task of the path.
    """

    request: TaskRequest
    write: Callable[[Sequence[Prepared[Any]], Any], bytes]
    task: Task | None = None


# Reads the JSON value of a body; raises an InvalidInputError if it is not a request of the task.
Reader: TypeAlias = Callable[[HostedModel, str, Any], ParsedRequest]


async def answer_request(
    model: HostedModel, task: str, request: Request, *, read: Reader | None = None
) -> Response:
    """Answer a request of a task, whose body is read here: no more of it than the limit.

    Args:
        read: reads the wire format; None for Hugging Face's.
    """
    _check_task(model, task)
    settings = model.settings
    ends_s = time.monotonic() + settings.deadline_s
    with model.in_use(task), model.budget.body() as count:
        reading = read_body(
            request,
            max_bytes=settings.max_body_bytes,
            deadline_s=settings.deadline_s,
            count=count,
        )
        # The body has no name here, so that its memory is free once it is parsed.
        replying = _reply(model, task, read or _read, await reading, ends_s)
        return await _until_disconnect(request, replying)


async def answer_call(model: HostedModel, task: str, inputs: Any, parameters: Any) -> Any:
    """Answer a call from Python with the values that a request has; return the reply's value."""
    _check_task(model, task)
    ends_s = time.monotonic() + model.settings.deadline_s
    request = _validate(model, task, {"inputs": inputs, "parameters": parameters})
    num_bytes = len(request.model_dump_json())
    with model.in_use(task):
        prepared = await model.thread.run(
            model.prepare, model.tasks[task], request, num_bytes=num_bytes, ends_s=ends_s
        )
        return await model.answer(
            request,
            prepared,
            lambda reply: reply,
            num_bytes=num_bytes,
            ends_s=ends_s,
        )


async def _reply(
    model: HostedModel, task: str, read: Reader, body: bytes, ends_s: float
) -> Response:
    num_bytes = len(body)
    preparing = model.thread.run(
        _prepare, model, task, read, body, num_bytes=num_bytes, ends_s=ends_s
    )
    del body
    parsed, prepared = await preparing
    reply = await model.answer(
        parsed.request,
        prepared,
        partial(parsed.write, prepared),
        num_bytes=num_bytes,
        ends_s=ends_s,
    )
    return Response(reply, headers=_note_headers(prepared), media_type=JSON)


def _prepare(
    model: HostedModel, task: str, read: Reader, body: bytes
) -> tuple[ParsedRequest, list[Prepared[Any]]]:
    parsed = read(model, task, parse_json(body))
    return parsed, model.prepare(parsed.task or model.tasks[task], parsed.request)


def _read(model: HostedModel, task: str, body: Any) -> ParsedRequest:
    return ParsedRequest(
        request=_validate(model, task, body),
        write=lambda _, reply: pydantic_core.to_json(reply),
    )


def _validate(model: HostedModel, task: str, body: Any) -> TaskRequest:
    """Return the request of a task; a list of too many inputs is refused before it is validated."""
    if isinstance(body, dict):
        model.check_num_items(body.get("inputs"))
    return validate(TASKS[task].request, body)


def _check_task(model: HostedModel, task: str) -> None:
    if task not in model.tasks:
        tasks = ", ".join(model.tasks)
        raise NotFoundError(f"the model {model.name} has no {task}. It has {tasks}.")


def _note_headers(prepared: Sequence[Prepared[Any]]) -> dict[str, str]:
    """Return headers for warnings and truncation, which the reply's format cannot express."""
    warnings = list(dict.fromkeys(text for item in prepared for text in item.warnings))
    num_truncated = sum(item.num_truncated for item in prepared)
    notes = {WARNINGS_HEADER: json.dumps(warnings)} if warnings else {}
    if num_truncated:
        notes[TRUNCATED_HEADER] = str(num_truncated)
    return notes


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the result of `work`, which is cancelled when the client disconnects."""
    watching = asyncio.ensure_future(_cancel_at_disconnect(request, asyncio.current_task()))
    try:
        return await work
    except asyncio.CancelledError:
        if not watching.done():
            raise
        return Response(status_code=_CLIENT_GONE)
    finally:
        watching.cancel()
        # An exception's traceback holds this frame, and `watching` the task that raises: without
        # this cycle a refused request's memory is free at once.
        del watching


async def _cancel_at_disconnect(request: Request, working: asyncio.Task[Any] | None) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    if working is not None:
        working.cancel()
