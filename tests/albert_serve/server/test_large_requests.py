"""Large requests have one thread; refused, late and cancelled ones leave nothing in memory."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from albert_serve.errors import DeadlineExceededError, InvalidInputError, TooMuchAtOnceError
from albert_serve.runtime.ort import return_free_memory
from albert_serve.server import models
from albert_serve.server.handlers import answer_request, read_body
from albert_serve.server.limits import SMALL_BYTES, Admission, Limits
from albert_serve.server.models import keep_memory_low, num_anonymous_bytes
from albert_serve.tasks import Prepared
from tests.albert_serve.batching.engines import FakeEngine, make_batcher, make_input, make_limits
from tests.albert_serve.support import without_garbage_collection

LARGE_BYTES = SMALL_BYTES + 1
MAX_ITEMS = 3
SOON_S = 20.0
HEADERS = [(b"content-type", b"application/json")]


def admission(num_bytes: int, limits: Limits | None = None, **settings: Any) -> Admission:
    """The admission of a request with a body of this size."""
    admitted = Admission(limits or make_limits(**settings), "fill-mask")
    admitted.num_bytes = num_bytes
    return admitted


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


def test_a_body_over_the_limit_of_all_has_room_where_it_is_alone() -> None:
    with admission(0, max_held_bytes=LARGE_BYTES) as admitted:
        admitted.count_bytes(LARGE_BYTES + 1)


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

    def __init__(self, end: str = "") -> None:
        self.limits = make_limits(deadline_s=0.2, max_items=MAX_ITEMS)
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


def request_of(body: Any) -> Request:
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/fill-mask", "headers": HEADERS}
    return Request({**scope, "albert_serve.request_id": "1"}, receive)


async def refusal(model: Any, body: Any, *, is_cancelled: bool = False) -> type[object]:
    """Return the type of the error, without the traceback, which holds the frames."""
    answering = asyncio.create_task(answer_request(model, "fill-mask", request_of(body)))
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

    async def receive() -> dict[str, Any]:
        for part in chunks:
            return {"type": "http.request", "body": part, "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

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


def test_too_many_items_are_refused_before_they_are_validated() -> None:
    body = {"inputs": [{"no": "text"}] * (MAX_ITEMS + 1)}
    assert asyncio.run(refusal(Refusing(), body)) is TooMuchAtOnceError


MB = 1 << 20
WITHIN_S = 20.0


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
        blocks = [b"1" * 60_000 for _ in range(2000)]  # which malloc keeps, unlike larger ones
        last = blocks[-1]
        del blocks
        assert held_mb() > before_mb + 50
        async with asyncio.timeout(WITHIN_S):
            while held_mb() > before_mb + 16:
                await asyncio.sleep(0.01)
        assert last
        returning.cancel()

    asyncio.run(run())
