"""Error replies of one format, and an id for every request.

Whether an endpoint, the router or BentoML refuses a request, the caller gets
`{"error", "error_type", "request_id"}` and the header `X-Request-ID`. At OpenAI's paths `error` is
an object, as its clients show nothing else.
"""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.api.embeddings import OpenAIError, OpenAIErrorReply
from albert_serve.api.schemas import ErrorReply
from albert_serve.errors import (
    AlbertServeError,
    QueueFullError,
    UnsupportedMediaError,
    request_error,
)
from albert_serve.server.logging import REQUEST_ID
from albert_serve.server.paths import HEALTH_PATHS, METRICS_PATH, target_of

JSON: Final = "application/json"
REQUEST_ID_HEADER: Final = "X-Request-ID"
_VALID_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
# Monitoring requests these every few seconds.
_UNLOGGED_PATHS: Final = HEALTH_PATHS | {METRICS_PATH}
_ID: Final = "albert_serve.request_id"
# Prefixes of the headers that an error reply keeps of the reply that it replaces: for browsers.
_KEPT_HEADERS: Final = ("vary", "access-control-")
_logger = logging.getLogger(__name__)
_access_logger = logging.getLogger("albert_serve.access_log")


class ErrorReplies:
    """ASGI middleware: request ids, the access log, and error replies of one format.

    Log lines of the application inside of it have the request's id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and replace a bare error by an error reply."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["path"] = target_of(scope).path  # in place of its label, which BentoML's metrics saw
        context = REQUEST_ID.set(request_id_of(scope))
        started_s = time.perf_counter()
        reply = _Reply(scope, receive, send)
        try:
            await self._answer(scope, receive, reply)
        finally:
            _log_access(scope, reply.status, time.perf_counter() - started_s)
            REQUEST_ID.reset(context)

    async def _answer(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        try:
            await self.app(scope, receive, reply.send)
        except Exception:
            _logger.exception("request %s failed", request_id_of(scope))
            if reply.started and not reply.finished:
                raise  # too late for an error reply: the server closes the connection
            if not reply.started:
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                await _replacement(scope, status, {})(scope, receive, reply.send)


class _Reply:
    """Sends a reply with the request's id; replaces an error of another format."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started = self.finished = False
        self.status: int | None = None
        self._scope = scope
        self._receive = receive
        self._send = send
        self._replaced_by: Response | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            if message["status"] >= HTTPStatus.BAD_REQUEST and REQUEST_ID_HEADER not in headers:
                self._replaced_by = _replacement(self._scope, message["status"], headers)
            else:
                headers[REQUEST_ID_HEADER] = request_id_of(self._scope)
        ends = message["type"] == "http.response.body" and not message.get("more_body")
        if self._replaced_by is None:
            await self._send(message)
        elif ends:
            await self._replaced_by(self._scope, self._receive, self._send)
        self.finished = self.finished or ends


def request_id_of(scope: Scope) -> str:
    """The id of the request: the caller's own, or one made for it at the first call."""
    if _ID not in scope:
        scope[_ID] = find_or_make_id(Headers(scope=scope))
    request_id: str = scope[_ID]
    return request_id


def id_header(scope: Scope) -> dict[str, str]:
    """The request id's header, which also marks a reply as ours, not to be replaced."""
    return {REQUEST_ID_HEADER: request_id_of(scope)}


def error_response(error: AlbertServeError, scope: Scope) -> Response:
    """Return the error reply of an error, with the error's status.

    Details of internal errors go to the log only: they may name files.
    """
    is_internal = error.status == HTTPStatus.INTERNAL_SERVER_ERROR
    message = _internal(error.error_type) if is_internal else str(error)
    response = _error_reply(scope, error.status, error.error_type, message)
    if isinstance(error, QueueFullError):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return response


def media_type_of(headers: Headers) -> str:
    """Return the declared media type of a body; "" if there is none."""
    return headers.get("content-type", "").split(";")[0].strip().lower()


def not_json(media_type: str) -> UnsupportedMediaError:
    """Return the error of a body that is not declared as JSON."""
    got = f"the content type is {media_type}" if media_type else "there is no Content-Type"
    return UnsupportedMediaError(f"{got}; send application/json")


def find_or_make_id(headers: Headers) -> str:
    """Return the caller's request id if it is valid, else a new one."""
    request_id = headers.get(REQUEST_ID_HEADER, "")
    return request_id if _VALID_ID.fullmatch(request_id) else uuid.uuid4().hex


def _replacement(scope: Scope, status: int, headers: Mapping[str, str]) -> Response:
    """Return the error reply in place of a bare one of the router, BentoML or an exception.

    Args:
        headers: those of the replaced reply.
    """
    allow = headers.get("allow")
    messages = {
        HTTPStatus.NOT_FOUND: f"there is nothing at {scope['path']}; see /docs for what there is",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{scope['method']} is not allowed here; use {allow}",
        HTTPStatus.SERVICE_UNAVAILABLE: "the service is not ready",
        HTTPStatus.INTERNAL_SERVER_ERROR: _internal("internal"),
    }
    message = messages.get(HTTPStatus(status), HTTPStatus(status).phrase)
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        kind = "method_not_allowed"  # the client never provokes it, so it has no class
    else:
        kind = request_error(status, message).error_type
    response = _error_reply(scope, status, kind, message)
    if allow:
        response.headers["Allow"] = allow
    response.headers.update(
        {name: value for name, value in headers.items() if name.lower().startswith(_KEPT_HEADERS)}
    )
    return response


def _internal(error_type: str) -> str:
    what = "the model failed on this request" if error_type == "engine" else "an unexpected error"
    return f"{what}; the service's log has it under the request's id"


def _log_access(scope: Scope, status: int | None, duration_s: float) -> None:
    if scope["path"] in _UNLOGGED_PATHS:
        return
    duration_ms = round(duration_s * 1000, 1)
    # Escaped as sent: a decoded line break would forge a log line.
    path = quote(scope["path"], safe="/")
    _access_logger.info(
        "%s %s %s %.1f ms (request %s)",
        scope["method"],
        path,
        status or "-",
        duration_ms,
        request_id_of(scope),
        extra={
            "method": scope["method"],
            "path": path,
            "status": status,
            "duration_ms": duration_ms,
        },
    )


def _error_reply(scope: Scope, status: int, error_type: str, message: str) -> Response:
    ids = {"error_type": error_type, "request_id": request_id_of(scope)}
    reply = (
        OpenAIErrorReply(error=OpenAIError(message=message, type=error_type), **ids)
        if target_of(scope).is_openai
        else ErrorReply(error=message, **ids)
    )
    return Response(
        reply.model_dump_json(),
        status,
        headers=id_header(scope),
        media_type=JSON,
    )
