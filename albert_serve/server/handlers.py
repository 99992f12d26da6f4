"""The request flow of the service: admit > read > prepare > run > finish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from albert_serve.api.schemas import TRUNCATED_HEADER, WARNINGS_HEADER
from albert_serve.errors import (
    BodyTooLargeError,
    MalformedRequestError,
    NotFoundError,
    UnsupportedMediaError,
)
from albert_serve.server.errors import JSON
from albert_serve.server.forms import READERS, ParsedRequest
from albert_serve.server.limits import Admission, admission_of
from albert_serve.server.models import HostedModel
from albert_serve.server.paths import ENDPOINTS
from albert_serve.tasks import Logits, Prepared, prepare_request, shape_reply
from albert_serve.tasks.base import finish_all, inputs_of

# nginx uses this status if the client disconnected. Only the log shows it.
_CLIENT_GONE: Final = 499
_ResultT = TypeVar("_ResultT")


async def answer_request(model: HostedModel, endpoint: str, request: Request) -> Response:
    """Answer an HTTP request to an endpoint of a task."""
    task = ENDPOINTS[endpoint]
    _check_task(model, task)
    with admission_of(request.scope, model.limits, task) as admission:
        # No variable refers to the body, so its memory is freed once the body is parsed.
        work = _answer(
            model,
            task,
            admission,
            partial(_parse, endpoint, model, await read_body(request, admission)),
        )
        answer = await _until_disconnect(request, work)
    if answer is None:
        return Response(status_code=_CLIENT_GONE)
    prepared, body = answer
    return Response(body, headers=_notice_headers(prepared), media_type=JSON)


async def answer_call(model: HostedModel, task: str, inputs: Any, parameters: Any) -> Any:
    """Return the value of the reply to a call from Python.

    Args:
        inputs: value of `inputs` in a request.
        parameters: value of `parameters` in a request.
    """
    _check_task(model, task)
    parsed = READERS[task](model, {"inputs": inputs, "parameters": parameters})
    parsed = replace(parsed, write=lambda _, reply: reply)
    with Admission(model.limits, task) as admission:
        admission.num_bytes = len(parsed.request.model_dump_json())
        return (await _answer(model, task, admission, lambda: parsed))[1]


async def _answer(
    model: HostedModel, task: str, admission: Admission, parse: Callable[[], ParsedRequest]
) -> tuple[list[Prepared[Any]], Any]:
    """Return the prepared items of a request, and the body of its reply."""
    preparation = admission.call(_prepare, model, task, parse)
    del parse  # `parse` keeps the body in memory
    parsed, prepared = await preparation
    logits = await model.batcher.run(inputs_of(prepared), admission.left_s)
    return prepared, await admission.call(_finish, parsed, prepared, logits)


def _parse(endpoint: str, model: HostedModel, body: bytes) -> ParsedRequest:
    return READERS[endpoint](model, parse_json(body))


def _prepare(
    model: HostedModel, task: str, parse: Callable[[], ParsedRequest]
) -> tuple[ParsedRequest, list[Prepared[Any]]]:
    parsed = parse()
    max_tokens = model.settings.max_queue_tokens
    return parsed, prepare_request(
        parsed.task or model.tasks[task], parsed.request, max_tokens=max_tokens
    )


def _finish(
    parsed: ParsedRequest, prepared: Sequence[Prepared[Any]], logits: Sequence[Logits]
) -> Any:
    return parsed.write(prepared, shape_reply(parsed.request, finish_all(prepared, logits)))


def _check_task(model: HostedModel, task: str) -> None:
    if task not in model.tasks:
        tasks = ", ".join(model.tasks)
        raise NotFoundError(f"The model {model.name} does not have {task}. Use one of {tasks}.")


async def read_body(request: Request, admission: Admission) -> bytes:
    """Read a request's body within the size limit and the deadline."""
    check_media_type(request.headers)
    settings = admission.limits.settings
    return await admission.in_time(
        asyncio.ensure_future(_read_body(request, admission, settings.max_body_bytes)),
        f"The body did not arrive within {settings.deadline_s:g} s. Try again.",
    )


async def _read_body(request: Request, admission: Admission, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "0")
    _check_size(int(length) if length.isdecimal() else 0, max_bytes)
    chunks: list[bytes] = []
    num_bytes, is_complete = 0, False
    while not is_complete:
        with admission.without_slot():
            message = await request.receive()  # does not suspend if the body has arrived
        if message["type"] == "http.disconnect":
            raise MalformedRequestError("The connection closed before the body was complete.")
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        _check_size(num_bytes, max_bytes)
        admission.count_bytes(num_bytes)
        is_complete = not message.get("more_body", False)
    return b"".join(chunks)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLargeError(f"The body has more than {max_bytes} bytes. Split it.")


def check_media_type(headers: Headers) -> None:
    """Reject a body that is not declared as JSON."""
    media = headers.get("content-type", "").split(";")[0].strip().lower()
    if media != JSON:
        problem = f"The content type is {media}" if media else "The Content-Type is missing"
        raise UnsupportedMediaError(f"{problem}. Send application/json.")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaError(
            f"The content encoding is {coding[:40]!r}. Send the body without compression."
        )


def parse_json(body: bytes) -> Any:
    """Return the JSON value of a body."""
    try:
        # Given bytes, `loads` would also accept UTF-16 and UTF-32, and lone surrogates in UTF-8.
        return json.loads(body.decode("utf-8-sig"), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedRequestError(f"The body is not JSON: {error}") from error


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON.")


def _notice_headers(prepared: Sequence[Prepared[Any]]) -> dict[str, str]:
    """Return headers about warnings and truncation, for which replies have no field."""
    warnings = list(dict.fromkeys(text for item in prepared for text in item.warnings))
    num_truncated = sum(item.num_truncated for item in prepared)
    headers = {WARNINGS_HEADER: json.dumps(warnings)} if warnings else {}
    if num_truncated:
        headers[TRUNCATED_HEADER] = str(num_truncated)
    return headers


async def _until_disconnect(
    request: Request, work: Coroutine[Any, Any, _ResultT]
) -> _ResultT | None:
    """Return the result of `work`, or cancel it and return None if the client disconnects."""
    disconnect_task = asyncio.ensure_future(_cancel_at_disconnect(request, asyncio.current_task()))
    try:
        return await work
    except asyncio.CancelledError:
        if not disconnect_task.done():
            raise
        return None
    finally:
        disconnect_task.cancel()
        # An exception's traceback refers to this frame, and `disconnect_task` to the task that
        # raises it. `del` breaks this cycle, so a rejected request's memory is freed immediately.
        del disconnect_task


async def _cancel_at_disconnect(request: Request, task: asyncio.Task[Any] | None) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    if task is not None:
        task.cancel()
