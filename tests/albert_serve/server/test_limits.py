"""The limits of requests: concurrency, bodies, the thread of large requests, and their memory."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from albert_serve.errors import (
    BodyTooLargeError,
    DeadlineExceededError,
    InvalidInputError,
    MalformedRequestError,
    QueueFullError,
)
from albert_serve.runtime.ort import return_free_memory
from albert_serve.server import models
from albert_serve.server.handlers import answer_request, read_body
from albert_serve.server.limits import Admission, AdmissionControl, Limits
from albert_serve.server.models import keep_memory_low, num_anonymous_bytes
from albert_serve.tasks import Prepared
from tests.albert_serve.batching.engines import (
    FakeEngine,
    make_batcher,
    make_input,
    make_limits,
)
from tests.albert_serve.support import without_garbage_collection

SMALL_BYTES = 4096
LARGE_BYTES = SMALL_BYTES + 1
SOON_S = 20.0
HEADERS = [(b"content-type", b"application/json")]


def scope() -> Scope:
    return {"type": "http", "method": "POST", "path": "/fill-mask", "headers": HEADERS}


def admission(num_bytes: int, limits: Limits | None = None, **settings: Any) -> Admission:
    """The admission of a request with a body of this size."""
    admitted = Admission(limits or make_limits(**settings), "fill-mask")
    admitted.num_bytes = num_bytes
    return admitted


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
    with admission(0, limits) as alone:
        alone.count_bytes(3 * LARGE_BYTES)
    with admission(0, limits) as first, admission(0, limits) as third:
        first.count_bytes(SMALL_BYTES)
        assert limits.large.num_bytes == 0
        first.count_bytes(LARGE_BYTES)
        with admission(0, limits) as second:
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


def test_a_request_has_a_slot_but_while_its_body_arrives() -> None:
    limits = make_limits()
    seen: list[int] = []
    parts = iter((True, False))

    async def receive() -> Any:
        await asyncio.sleep(0)
        seen.append(limits.num_requests)
        return {"type": "http.request", "body": b" ", "more_body": next(parts)}

    async def run() -> None:
        admitted = limits.admit("fill-mask")
        request = Request({"type": "http", "method": "POST", "headers": HEADERS}, receive)
        assert await read_body(request, admitted) == b"  "
        seen.append(limits.num_requests)
        assert admitted.num_bytes == 2

    asyncio.run(run())
    assert seen == [0, 0, 1]


def test_a_declared_size_over_the_limit_is_refused_unread_and_a_lost_body_is_malformed() -> None:
    messages = iter([{"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def read(num_bytes: int) -> None:
        headers = [*HEADERS, (b"content-length", str(num_bytes).encode())]
        request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
        await read_body(request, admission(0, max_body_bytes=100))

    with pytest.raises(BodyTooLargeError):
        asyncio.run(read(101))
    with pytest.raises(MalformedRequestError):
        asyncio.run(read(100))


def thread_name() -> str:
    return threading.current_thread().name


def test_large_requests_have_one_thread_and_small_ones_none() -> None:
    async def names(num_bytes: int) -> set[str]:
        limits = make_limits()
        calls = (admission(num_bytes, limits).call(thread_name) for _ in range(4))
        return {*await asyncio.gather(*calls)}

    here = {thread_name()}
    assert asyncio.run(names(SMALL_BYTES)) == here
    (thread,) = asyncio.run(names(LARGE_BYTES)) - here
    assert thread.startswith("large-requests")


def test_what_is_cancelled_or_late_before_its_turn_never_begins() -> None:
    begun: list[str] = []

    async def run() -> None:
        limits, free = make_limits(), threading.Event()

        def turn(name: str, *, in_s: float = SOON_S) -> asyncio.Task[None]:
            admitted = admission(LARGE_BYTES, limits)
            admitted.ends_s = time.monotonic() + in_s
            return asyncio.create_task(admitted.call(begun.append, name))

        first = asyncio.create_task(admission(LARGE_BYTES, limits).call(free.wait, SOON_S))
        cancelled, late, last = turn("cancelled"), turn("late", in_s=0.05), turn("last")
        with pytest.raises(DeadlineExceededError):
            await late
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        free.set()
        await asyncio.gather(first, last)

    asyncio.run(run())
    assert begun == ["last"]


class Held:
    """The local variables of a request's frames."""


class Refusing:
    """A model that refuses every request: as it prepares it in the thread, or as it answers it.

    Attributes:
        held: what the request's frames held then.
    """

    name = "tiny"
    settings = SimpleNamespace(max_queue_tokens=64)
    held: weakref.ref[Held]

    def __init__(self, end: str) -> None:
        self.limits = make_limits(deadline_s=0.2)
        self.tasks = {"fill-mask": self}
        self.batcher = self
        self._end = end

    def prepare(self, *_: Any) -> Prepared[Any]:
        held = Held()
        self.held = weakref.ref(held)
        if self._end in ("late in the thread", "cancelled"):
            time.sleep(0.3)
        if self._end == "refused in the thread":
            raise InvalidInputError("refused")
        return Prepared(inputs=[], finish=lambda _: None)

    async def run(self, _inputs: Any, deadline_s: float) -> Any:
        held = Held()
        self.held = weakref.ref(held)
        if self._end == "late":
            engine = FakeEngine()
            engine.open.clear()
            try:
                await make_batcher(engine).run([make_input([1])], deadline_s)
            finally:
                engine.open.set()
        raise InvalidInputError("refused")


async def refusal(model: Any, body: Any, *, is_cancelled: bool) -> type[object]:
    """Return the type of the error, without the traceback, which holds the frames."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        return messages.pop() if messages else await never()

    sent = {**scope(), "albert_serve.request_id": "1"}
    answering = asyncio.create_task(answer_request(model, "fill-mask", Request(sent, receive)))
    if is_cancelled:
        asyncio.get_running_loop().call_later(0.05, answering.cancel)
    await asyncio.wait({answering})
    if answering.cancelled():
        return asyncio.CancelledError
    return type(answering.exception())


@pytest.mark.parametrize(
    ("num_chars", "end", "expected"),
    [
        (1, "refused", InvalidInputError),
        (1, "late", DeadlineExceededError),
        (LARGE_BYTES, "refused", InvalidInputError),
        (LARGE_BYTES, "late", DeadlineExceededError),
        (LARGE_BYTES, "refused in the thread", InvalidInputError),
        (LARGE_BYTES, "late in the thread", DeadlineExceededError),
        (LARGE_BYTES, "cancelled", asyncio.CancelledError),
    ],
)
def test_a_request_that_has_ended_is_freed_without_a_garbage_collection(
    num_chars: int, end: str, expected: type[BaseException]
) -> None:
    model, body = Refusing(end), {"inputs": "a" * num_chars}

    async def run() -> None:
        error = await refusal(model, body, is_cancelled=end == "cancelled")
        assert error is expected
        next_one = admission(LARGE_BYTES, model.limits)
        next_one.ends_s += SOON_S
        await next_one.call(Held)  # the thread is done with it

    with without_garbage_collection():
        asyncio.run(run())
        assert model.held() is None


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_body_that_does_not_end_is_freed_without_a_garbage_collection(is_cancelled: bool) -> None:
    chunk = bytes(bytearray(1000))
    chunks = iter([chunk])

    async def receive() -> Message:
        for part in chunks:
            return {"type": "http.request", "body": part, "more_body": True}
        return await never()

    async def run() -> None:
        request = Request({"type": "http", "method": "POST", "headers": HEADERS}, receive)
        reading = asyncio.create_task(read_body(request, admission(0, deadline_s=0.05)))
        if is_cancelled:
            asyncio.get_running_loop().call_later(0.01, reading.cancel)
        await asyncio.wait({reading})
        assert reading.cancelled() or isinstance(reading.exception(), DeadlineExceededError)

    num_references = sys.getrefcount(chunk)
    with without_garbage_collection():
        asyncio.run(run())
        assert sys.getrefcount(chunk) == num_references - 1  # that of `chunks`


MB = 1 << 20


def held_mb() -> float:
    num_bytes = num_anonymous_bytes()
    assert num_bytes is not None
    return num_bytes / MB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_CHECK_EVERY_S", 0.05)

    async def run() -> None:
        return_free_memory()  # what other tests freed, which the blocks would take
        returning = asyncio.create_task(keep_memory_low())
        await asyncio.sleep(0)
        before_mb = held_mb()
        memory = psutil.Process().memory_info()
        assert before_mb == pytest.approx((memory.rss - memory.shared) / MB, abs=8)
        blocks = [b"1" * 60_000 for _ in range(2000)]  # which malloc keeps, unlike larger ones
        last = blocks[-1]
        del blocks
        assert held_mb() > before_mb + 50
        async with asyncio.timeout(SOON_S):
            while held_mb() > before_mb + 16:
                await asyncio.sleep(0.01)
        assert last
        returning.cancel()

    asyncio.run(run())
