"""The limits of concurrent requests, and of large bodies."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from albert_serve.errors import (
    QueueFullError,
)
from albert_serve.server.limits import Admission, AdmissionControl, Limits
from tests.albert_serve.batching.engines import (
    make_limits,
)

SMALL_BYTES = 4096
LARGE_BYTES = SMALL_BYTES + 1
HEADERS = [(b"content-type", b"application/json")]


def scope() -> Scope:
    return {"type": "http", "method": "POST", "path": "/fill-mask", "headers": HEADERS}


def admission(limits: Limits) -> Admission:
    return Admission(limits, "fill-mask")


@pytest.mark.parametrize("has_reply", [False, True])
def test_a_slot_is_free_once_the_reply_begins_or_the_request_fails(has_reply: bool) -> None:
    limits, seen = make_limits(max_concurrency=1), list[int]()

    async def fail(_scope: Scope, _receive: Receive, send: Send) -> None:
        seen.append(limits.num_requests)
        if has_reply:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ArithmeticError

    async def send(_message: Message) -> None:
        seen.append(limits.num_requests)

    control = AdmissionControl(fail, find=lambda target: (limits, str(target.task)))
    with pytest.raises(ArithmeticError):
        asyncio.run(control(scope(), never, send))
    assert [*seen, limits.num_requests] == ([1, 0, 0] if has_reply else [1, 0])


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def test_large_bodies_have_one_bound_which_a_single_one_may_exceed() -> None:
    limits = make_limits(max_held_bytes=2 * LARGE_BYTES)
    with admission(limits) as alone:
        alone.count_bytes(3 * LARGE_BYTES)
    with admission(limits) as first, admission(limits) as third:
        first.count_bytes(SMALL_BYTES)
        assert limits.large.num_bytes == 0
        first.count_bytes(LARGE_BYTES)
        with admission(limits) as second:
            second.count_bytes(LARGE_BYTES)
            third.count_bytes(SMALL_BYTES)
            with pytest.raises(QueueFullError, match="8194 bytes"):
                third.count_bytes(LARGE_BYTES)
            assert limits.large.num_bytes == 2 * LARGE_BYTES
        with pytest.raises(QueueFullError):
            third.count_bytes(LARGE_BYTES + 1)
        third.count_bytes(LARGE_BYTES)
        assert not limits.unused.is_set()
    assert limits.large.num_bytes == 0
    assert limits.unused.is_set()
