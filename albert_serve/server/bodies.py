"""The bodies of requests: read within limits of bytes and time, and parsed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from albert_serve.errors import (
    BodyTooLargeError,
    MalformedRequestError,
    QueueFullError,
    UnsupportedMediaError,
)
from albert_serve.server.error_replies import JSON
from albert_serve.server.worker_thread import SMALL_BYTES, finish_in_time


class BodyBudget:
    """The memory for all large bodies that have not been answered.

    Args:
        max_bytes: the limit of their sum; a single body may exceed it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body, as they arrive, until `with` ends.

        Yields:
            A function of the body's bytes so far. It raises a QueueFullError if the body is large
            and does not fit next to the others, because clients may leave bodies unfinished.
        """
        num_counted = 0

        def count(num_bytes: int) -> None:
            nonlocal num_counted
            if num_bytes <= SMALL_BYTES:
                return
            others = self._num_bytes - num_counted
            if others and others + num_bytes > self._max_bytes:
                raise QueueFullError(
                    f"bodies of {others} bytes are in progress, and this one does not fit; the "
                    f"limit is {self._max_bytes} bytes. Try again later."
                )
            self._num_bytes += num_bytes - num_counted
            num_counted = num_bytes

        try:
            yield count
        finally:
            self._num_bytes -= num_counted


async def read_body(
    request: Request, *, max_bytes: int, deadline_s: float, count: Callable[[int], None]
) -> bytes:
    """Read a request's body.

    Args:
        count: called with the bytes so far; raises if they do not fit next to other bodies.
    """
    check_media_type(request.headers)
    return await finish_in_time(
        asyncio.ensure_future(_read_body(request, max_bytes, count)),
        time.monotonic() + deadline_s,
        f"the body did not arrive within {deadline_s:g} s",
    )


def check_media_type(headers: Headers) -> None:
    """Refuse a body that is not declared as JSON.

    Raises:
        UnsupportedMediaError: the content type is not JSON, or the body is compressed.
    """
    media = headers.get("content-type", "").split(";")[0].strip().lower()
    if media != JSON:
        problem = f"the content type is {media}" if media else "there is no Content-Type"
        raise UnsupportedMediaError(f"{problem}. Send application/json.")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaError(
            f"the content encoding is {coding[:40]!r}. Send the body without compression."
        )


def parse_json(body: bytes) -> Any:
    """Return the JSON value of a body.

    Raises:
        MalformedRequestError: it is not JSON.
    """
    try:
        # From bytes it would also accept UTF-16 and UTF-32, and lone surrogates in UTF-8.
        return json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedRequestError(f"the body is not JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


async def _read_body(request: Request, max_bytes: int, count: Callable[[int], None]) -> bytes:
    declared = request.headers.get("content-length", "0")
    num_bytes = int(declared) if declared.isdecimal() else 0
    chunks: list[bytes] = []
    if num_bytes <= max_bytes:
        num_bytes = 0
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    break
                count(num_bytes)
                chunks.append(chunk)
        except ClientDisconnect as error:
            raise MalformedRequestError("the connection closed within the body") from error
    if num_bytes > max_bytes:
        raise BodyTooLargeError(f"the body is over the limit of {max_bytes} bytes. Split it.")
    return b"".join(chunks)
