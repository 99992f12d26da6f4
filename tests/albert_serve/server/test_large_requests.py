"""Large requests have one thread; what cannot be read in time is refused, and then forgotten."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from albert_serve.errors import DeadlineExceededError, InvalidInputError, QueueFullError
from albert_serve.server.large_requests import SMALL_BYTES, LargeRequests
from tests.albert_serve.support import without_garbage_collection

LARGE_BYTES = SMALL_BYTES + 1
SOON_S = 20.0


def make(max_bytes: int = 1 << 30) -> LargeRequests:
    return LargeRequests(max_bytes)


def in_s(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


def thread_name() -> str:
    return threading.current_thread().name


def test_large_requests_have_one_thread_and_small_ones_none() -> None:
    async def names(num_bytes: int) -> set[str]:
        large = make()
        reading = (large.read(thread_name, num_bytes=num_bytes, ends_s=in_s()) for _ in range(4))
        running = (large.run(thread_name, num_bytes=num_bytes, ends_s=in_s()) for _ in range(4))
        return {*await asyncio.gather(*reading, *running)}

    here = {thread_name()}
    assert asyncio.run(names(SMALL_BYTES)) == here
    (thread,) = asyncio.run(names(LARGE_BYTES)) - here
    assert thread.startswith("large-requests")


def test_what_is_cancelled_or_late_before_its_turn_never_begins() -> None:
    begun: list[str] = []

    async def run() -> None:
        large, free = make(), threading.Event()

        def turn(name: str, ends_s: float) -> asyncio.Task[None]:
            call = large.read(begun.append, name, num_bytes=LARGE_BYTES, ends_s=ends_s)
            return asyncio.create_task(call)

        first = asyncio.create_task(
            large.run(free.wait, SOON_S, num_bytes=LARGE_BYTES, ends_s=in_s())
        )
        cancelled, late, last = (
            turn("cancelled", in_s()),
            turn("late", in_s(0.05)),
            turn("last", in_s()),
        )
        with pytest.raises(DeadlineExceededError):
            await late
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        free.set()
        await asyncio.gather(first, last)

    asyncio.run(run())
    assert begun == ["last"]


def test_what_cannot_be_read_in_time_is_refused_by_the_measured_rate() -> None:
    async def run() -> None:
        large = make()

        def read(seconds: float, ends_s: float) -> asyncio.Task[None]:
            call = large.read(time.sleep, seconds, num_bytes=LARGE_BYTES, ends_s=ends_s)
            return asyncio.create_task(call)

        for _ in range(20):  # some 0.01 s for each of this size
            await read(0.01, in_s())
        waiting = [read(0.01, in_s()) for _ in range(10)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="large requests are being read") as caught:
            await read(0.0, in_s(0.05))
        assert caught.value.retry_after_s >= 1
        await asyncio.gather(*waiting, read(0.0, in_s()))
        await read(0.0, in_s(0.05))  # nothing waits any more

    asyncio.run(run())


class Held:
    """What a request holds in memory."""


def fail(_: Held) -> None:
    raise InvalidInputError("refused")


async def run_late(large: LargeRequests, held: Held) -> None:
    await large.read(lambda held: time.sleep(0.1), held, num_bytes=LARGE_BYTES, ends_s=in_s(0.02))


async def run_refused(large: LargeRequests, held: Held) -> None:
    await large.read(fail, held, num_bytes=LARGE_BYTES, ends_s=in_s())


async def run_cancelled(large: LargeRequests, held: Held) -> None:
    call = large.read(lambda held: time.sleep(0.1), held, num_bytes=LARGE_BYTES, ends_s=in_s())
    task = asyncio.create_task(call)
    await asyncio.sleep(0.01)
    task.cancel()
    await task


@pytest.mark.parametrize("end", [run_late, run_refused, run_cancelled])
def test_a_request_that_has_ended_is_freed_without_a_garbage_collection(
    end: Callable[..., object],
) -> None:
    async def run() -> weakref.ref[Held]:
        large, held = make(), Held()
        await asyncio.gather(end(large, held), return_exceptions=True)  # type: ignore[call-overload]
        await large.run(Held, num_bytes=LARGE_BYTES, ends_s=in_s())  # the thread is done with it
        return weakref.ref(held)

    with without_garbage_collection():
        assert asyncio.run(run())() is None
