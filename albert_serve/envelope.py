"""One envelope for every reply that is not a success, and an id for every request.

Whatever refuses a request, an endpoint, the router or BentoML, the caller gets
`{"error", "error_type", "request_id"}` and the header `X-Request-ID`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import uuid
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.errors import (
    AlbertServeError,
    BodyTooLargeError,
    DeadlineExceededError,
    MalformedRequestError,
    QueueFullError,
    UnsupportedMediaError,
    request_error,
)
from albert_serve.schemas import ErrorReply

REQUEST_ID_HEADER: Final = "X-Request-ID"
_SANE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_logger = logging.getLogger(__name__)


class Envelope:
    """ASGI middleware: gives each request its id, and each error the envelope."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and see that its reply keeps the contract."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["albert_serve.request_id"] = _find_or_make_id(Headers(scope=scope))
        reply = _Reply(scope, receive, send)
        try:
            await self.app(scope, receive, reply.send)
        except Exception:
            _logger.exception("request %s failed", request_id_of(scope))
            if reply.started and not reply.finished:
                raise  # too late for an envelope: the server closes the connection
            if not reply.started:
                await _replacement(scope, HTTPStatus.INTERNAL_SERVER_ERROR)(scope, receive, send)


class _Reply:
    """Sends a reply on, with the id; one that is an error without the envelope is replaced."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started = self.finished = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._instead: Response | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            if message["status"] >= HTTPStatus.BAD_REQUEST and REQUEST_ID_HEADER not in headers:
                self._instead = _replacement(self._scope, message["status"], headers.get("allow"))
            else:
                headers[REQUEST_ID_HEADER] = request_id_of(self._scope)
        ends = message["type"] == "http.response.body" and not message.get("more_body")
        if self._instead is None:
            await self._send(message)
        elif ends:
            await self._instead(self._scope, self._receive, self._send)
        self.finished = self.finished or ends


def request_id_of(scope: Scope) -> str:
    """The id of the request: the caller's own, or one made for it."""
    request_id: str = scope["albert_serve.request_id"]
    return request_id


def id_header(scope: Scope) -> dict[str, str]:
    """The header that marks a reply as ours: it is not replaced."""
    return {REQUEST_ID_HEADER: request_id_of(scope)}


def error_response(error: AlbertServeError, scope: Scope) -> Response:
    """The envelope of an error, with the status that the error knows."""
    response = _envelope(scope, error.status, error.error_type, str(error))
    if isinstance(error, QueueFullError):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return response


async def read_json(request: Request, *, max_bytes: int, deadline_s: float) -> Any:
    """The JSON value of a request's body.

    Raises:
        UnsupportedMediaError: the content type is not JSON.
        BodyTooLargeError: the body is over the limit; the rest of it is not read.
        DeadlineExceededError: the body did not arrive in time.
        MalformedRequestError: the body is not JSON.
    """
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        got = f"the content type is {media}" if media else "there is no Content-Type"
        raise UnsupportedMediaError(f"{got}; send application/json")
    try:
        async with asyncio.timeout(deadline_s):
            body = await _read_body(request, max_bytes)
    except TimeoutError:
        raise DeadlineExceededError(f"the body did not arrive within {deadline_s:g} s") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedRequestError(f"the body is not JSON: {error}") from error


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    size = int(declared) if declared.isdecimal() else 0
    chunks: list[bytes] = []
    if size <= max_bytes:
        size = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    break
                chunks.append(chunk)
        except ClientDisconnect as error:
            raise MalformedRequestError("the connection closed within the body") from error
    if size > max_bytes:
        raise BodyTooLargeError(f"the body is over the limit of {max_bytes} bytes; split it")
    return b"".join(chunks)


def _find_or_make_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _replacement(scope: Scope, status: int, allow: str | None = None) -> Response:
    """The envelope in place of a bare reply of the router, of BentoML, or of an exception."""
    told = {
        HTTPStatus.NOT_FOUND: f"there is nothing at {scope['path']}; see /docs for what there is",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{scope['method']} is not allowed here; use {allow}",
        HTTPStatus.SERVICE_UNAVAILABLE: "the service is not ready",
        HTTPStatus.INTERNAL_SERVER_ERROR: "an unexpected error; the service's log has it under "
        "the request's id",
    }
    message = told.get(HTTPStatus(status), HTTPStatus(status).phrase)
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        kind = "method_not_allowed"  # the client never provokes it, so it has no class
    else:
        kind = request_error(status, message).error_type
    response = _envelope(scope, status, kind, message)
    if allow:
        response.headers["Allow"] = allow
    return response


def _envelope(scope: Scope, status: int, error_type: str, message: str) -> Response:
    reply = ErrorReply(error=message, error_type=error_type, request_id=request_id_of(scope))
    return Response(
        reply.model_dump_json(),
        status,
        headers=id_header(scope),
        media_type="application/json",
    )
