"""The bodies of requests: read and parsed, with limits on bytes, values and time.

Parsing keeps all other threads waiting, and takes as long as there are values: so these are counted
before, at a fraction of the time.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, NoReturn

import numpy as np
from starlette.requests import ClientDisconnect, Request

from albert_serve.errors import (
    BodyTooLargeError,
    DeadlineExceededError,
    MalformedRequestError,
    TooMuchAtOnceError,
    UnsupportedMediaError,
)
from albert_serve.server.error_replies import JSON, media_type_of, not_json

# Each but one stands before a value, or is in a string.
_VALUE_SIGNS: Final = b",[{"


async def read_body(request: Request, *, max_bytes: int, deadline_s: float) -> bytes:
    """Read a request's body.

    Raises:
        UnsupportedMediaError: the content type is not JSON, or the body is compressed.
        BodyTooLargeError: the body is over the limit; the rest of it is not read.
        DeadlineExceededError: the body did not arrive in time.
        MalformedRequestError: the connection closed within the body.
    """
    media = media_type_of(request.headers)
    if media != JSON:
        raise not_json(media)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaError(
            f"the content encoding is {coding[:40]!r}; send the body as it is"
        )
    try:
        async with asyncio.timeout(deadline_s):
            return await _read_body(request, max_bytes)
    except TimeoutError:
        raise DeadlineExceededError(f"the body did not arrive within {deadline_s:g} s") from None


def parse_json(body: bytes, *, max_values: int) -> Any:
    """Return the JSON value of a body.

    Raises:
        TooMuchAtOnceError: it has more values than the limit, all lists and objects included.
        MalformedRequestError: it is not JSON.
    """
    if _num_values(body, max_values) > max_values:
        raise TooMuchAtOnceError(
            f"the body has over {max_values} values, which is more than any request that can be "
            "answered has: split it"
        )
    try:
        # From bytes it would also accept UTF-16 and UTF-32, and lone surrogates in UTF-8.
        return json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedRequestError(f"the body is not JSON: {error}") from error


def _num_values(body: bytes, enough: int) -> int:
    """Return the number of values; one that is not over `enough` may be less than counted."""
    num_signs = sum(body.count(sign) for sign in _VALUE_SIGNS)
    if num_signs < enough:
        return num_signs + 1
    signs = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), dtype=np.uint8)
    in_string = np.cumsum(signs == ord('"'), dtype=np.uint8) & 1
    is_sign = np.isin(signs, np.frombuffer(_VALUE_SIGNS, dtype=np.uint8))
    return 1 + int(np.count_nonzero(is_sign & (in_string == 0)))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


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
