"""Error replies in one format, and an id for every request.

If an endpoint, the router or BentoML rejects a request, the caller gets
`{"error", "error_type", "request_id"}` and the header `X-Request-ID`. At OpenAI's paths `error` is
an object, because OpenAI's clients show nothing else.
"""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from http import HTTPStatus
from typing import Final
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.api.embeddings import OpenAIError, OpenAIErrorReply
from albert_serve.api.schemas import ErrorReply
from albert_serve.errors import AlbertServeError, QueueFullError, request_error
from albert_serve.server.logging import REQUEST_ID
from albert_serve.server.paths import HEALTH_PATHS, METRICS_PATH, target_of

JSON: Final = "application/json"
REQUEST_ID_HEADER: Final = "X-Request-ID"
_VALID_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
# Monitoring requests these paths every few seconds.
_UNLOGGED_PATHS: Final = HEALTH_PATHS | {METRICS_PATH}
_ID: Final = "albert_serve.request_id"
_logger = logging.getLogger(__name__)
_access_logger = logging.getLogger("albert_serve.access_log")


class ErrorReplies:
    """ASGI middleware that adds request ids, an access log, and replies to unexpected errors.

    Log lines of the inner application contain the request's id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = REQUEST_ID.set(_request_id(scope))
        started_s = time.perf_counter()
        reply = _Reply(scope, send)
        try:
            await self.app(scope, receive, reply.send)
        except Exception:
            _logger.exception("Request %s failed.", _request_id(scope))
            if reply.status is None:
                await _internal_reply(scope)(scope, receive, reply.send)
            elif not reply.is_finished:
                raise  # an error reply is no longer possible, so the server closes the connection
        finally:
            _log_access(scope, reply.status, time.perf_counter() - started_s)
            REQUEST_ID.reset(context)


class _Reply:
    """A reply that is sent with the request's id.

    Attributes:
        status: HTTP status, or None until the reply has begun.
        is_finished: whether the complete reply has been sent.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.status: int | None = None
        self.is_finished = False
        self._scope = scope
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            headers[REQUEST_ID_HEADER] = _request_id(self._scope)
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)
        self.is_finished = self.is_finished or is_last


def _request_id(scope: Scope) -> str:
    """Return the request's id, which the caller sent or the first call of this function made."""
    if _ID not in scope:
        sent_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        scope[_ID] = sent_id if _VALID_ID.fullmatch(sent_id) else uuid.uuid4().hex
    request_id: str = scope[_ID]
    return request_id


def error_response(error: AlbertServeError, scope: Scope) -> Response:
    """Return the reply to an error, with the error's status.

    Only the log contains the details of internal errors, because they may name files.
    """
    is_internal = error.status == HTTPStatus.INTERNAL_SERVER_ERROR
    message = _internal(error.error_type) if is_internal else str(error)
    response = _error_reply(scope, error.status, error.error_type, message)
    if isinstance(error, QueueFullError):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return response


async def _reply_to_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AlbertServeError)
    if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _logger.error("Request %s failed.", _request_id(request.scope), exc_info=error)
    return error_response(error, request.scope)


async def _reply_to_rejection(request: Request, error: Exception) -> Response:
    """Return the reply to a request that the router or one of BentoML's routes rejects."""
    assert isinstance(error, HTTPException)
    scope, status, allow = request.scope, error.status_code, (error.headers or {}).get("Allow")
    messages = {
        HTTPStatus.NOT_FOUND: f"{scope['path']} does not exist. See /docs for the addresses.",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{scope['method']} is not allowed here. Use {allow}.",
        HTTPStatus.SERVICE_UNAVAILABLE: "The service is not ready. Try again later.",
    }
    message = messages.get(HTTPStatus(status), HTTPStatus(status).phrase)
    kind = request_error(status, message).error_type
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        # This status has no error class, because our clients never cause it.
        kind = "method_not_allowed"
    response = _error_reply(scope, status, kind, message)
    if allow:
        response.headers["Allow"] = allow
    return response


async def _reply_to_bug(request: Request, _error: Exception) -> Response:
    return _internal_reply(request.scope)


# Starlette raises unexpected exceptions again after their handler, so `ErrorReplies` logs them.
EXCEPTION_HANDLERS: Final = {
    AlbertServeError: _reply_to_error,
    HTTPException: _reply_to_rejection,
    Exception: _reply_to_bug,
}


def _internal_reply(scope: Scope) -> Response:
    return error_response(AlbertServeError("An unexpected error."), scope)


def _internal(error_type: str) -> str:
    is_engine = error_type == "engine"
    fault = "The model failed on this request." if is_engine else "An unexpected error occurred."
    return f"{fault} The service's log has the details under the request's id."


def _log_access(scope: Scope, status: int | None, duration_s: float) -> None:
    if scope["path"] in _UNLOGGED_PATHS:
        return
    duration_ms = round(duration_s * 1000, 1)
    # The path is escaped, because a decoded line break would forge a log line.
    path = quote(scope["path"], safe="/")
    _access_logger.info(
        "%s %s %s %.1f ms (request %s)",
        scope["method"],
        path,
        status or "-",
        duration_ms,
        _request_id(scope),
        extra={
            "method": scope["method"],
            "path": path,
            "status": status,
            "duration_ms": duration_ms,
        },
    )


def _error_reply(scope: Scope, status: int, error_type: str, message: str) -> Response:
    ids = {"error_type": error_type, "request_id": _request_id(scope)}
    reply = (
        OpenAIErrorReply(error=OpenAIError(message=message, type=error_type), **ids)
        if target_of(scope).is_openai
        else ErrorReply(error=message, **ids)
    )
    return Response(
        reply.model_dump_json(),
        status,
        headers={REQUEST_ID_HEADER: _request_id(scope)},  # for replies outside `ErrorReplies`
        media_type=JSON,
    )
