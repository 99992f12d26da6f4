"""Large requests have one thread; late and cancelled ones are forgotten."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from albert_serve.errors import DeadlineExceededError, InvalidInputError
from albert_serve.server.worker_thread import SMALL_BYTES, WorkerThread
from tests.albert_serve.support import without_garbage_collection

LARGE_BYTES = SMALL_BYTES + 1
SOON_S = 20.0


def in_s(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


def thread_name() -> str:
    return threading.current_thread().name


def test_large_requests_have_one_thread_and_small_ones_none() -> None:
    async def names(num_bytes: int) -> set[str]:
        worker = WorkerThread()
        running = (worker.run(thread_name, num_bytes=num_bytes, ends_s=in_s()) for _ in range(4))
        return {*await asyncio.gather(*running)}

    here = {thread_name()}
    assert asyncio.run(names(SMALL_BYTES)) == here
    (thread,) = asyncio.run(names(LARGE_BYTES)) - here
    assert thread.startswith("large-requests")


def test_what_is_cancelled_or_late_before_its_turn_never_begins() -> None:
    begun: list[str] = []

    async def run() -> None:
        worker, free = WorkerThread(), threading.Event()

        def turn(name: str, ends_s: float) -> asyncio.Task[None]:
            call = worker.run(begun.append, name, num_bytes=LARGE_BYTES, ends_s=ends_s)
            return asyncio.create_task(call)

        first = asyncio.create_task(
            worker.run(free.wait, SOON_S, num_bytes=LARGE_BYTES, ends_s=in_s())
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


class Held:
    """What a request holds in memory."""


def fail(_: Held) -> None:
    raise InvalidInputError("refused")


async def run_late(worker: WorkerThread, held: Held) -> None:
    await worker.run(lambda held: time.sleep(0.1), held, num_bytes=LARGE_BYTES, ends_s=in_s(0.02))


async def run_refused(worker: WorkerThread, held: Held) -> None:
    await worker.run(fail, held, num_bytes=LARGE_BYTES, ends_s=in_s())


async def run_cancelled(worker: WorkerThread, held: Held) -> None:
    call = worker.run(lambda held: time.sleep(0.1), held, num_bytes=LARGE_BYTES, ends_s=in_s())
    task = asyncio.create_task(call)
    await asyncio.sleep(0.01)
    task.cancel()
    await task


@pytest.mark.parametrize("end", [run_late, run_refused, run_cancelled])
def test_a_request_that_has_ended_is_freed_without_a_garbage_collection(
    end: Callable[..., object],
) -> None:
    async def run() -> weakref.ref[Held]:
        worker, held = WorkerThread(), Held()
        await asyncio.gather(end(worker, held), return_exceptions=True)  # type: ignore[call-overload]
        await worker.run(Held, num_bytes=LARGE_BYTES, ends_s=in_s())  # the thread is done with it
        return weakref.ref(held)

    with without_garbage_collection():
        assert asyncio.run(run())() is None
