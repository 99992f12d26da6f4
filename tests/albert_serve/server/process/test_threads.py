"""Where requests are read: on the event loop, in threads, or all large ones in one thread."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from functools import partial

import pytest

from albert_serve.errors import DeadlineExceededError
from albert_serve.server.process.threads import Effort, RequestThreads, lower_priority

SOON_S = 20.0


def ends_s() -> float:
    return time.monotonic() + SOON_S


def thread_name(all_here: threading.Barrier | None = None) -> str:
    if all_here is not None:
        all_here.wait(SOON_S)
    return threading.current_thread().name


def test_large_requests_have_one_thread_others_several_and_small_ones_none() -> None:
    async def run() -> list[list[str]]:
        threads = RequestThreads()
        both = threading.Barrier(2)  # which one thread alone would not pass

        async def names(
            effort: Effort, num: int, barrier: threading.Barrier | None = None
        ) -> list[str]:
            runs = (
                threads.run(thread_name, barrier, ends_s=ends_s(), effort=effort)
                for _ in range(num)
            )
            return await asyncio.gather(*runs)

        return [
            await names(Effort.SMALL, 2),
            await names(Effort.MEDIUM, 2, both),
            await names(Effort.LARGE, 4),
        ]

    small, medium, large = map(set, asyncio.run(run()))
    assert small == {threading.current_thread().name}
    assert len(medium) == 2
    assert len(large) == 1
    assert not medium & large


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a nice value is a process's")
def test_threads_of_requests_yield_to_the_event_loop() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def run() -> list[int]:
        threads = RequestThreads(start_thread=lower_priority)
        return [await threads.run(niceness, ends_s=ends_s(), effort=effort) for effort in Effort]

    here, *in_threads = asyncio.run(run())
    assert here == niceness()
    assert all(here < there for there in in_threads)


def test_what_is_cancelled_before_its_turn_never_begins() -> None:
    begun: list[str] = []

    async def run() -> None:
        threads, free = RequestThreads(), threading.Event()
        in_turn = partial(threads.run, effort=Effort.LARGE)
        first = asyncio.ensure_future(in_turn(free.wait, SOON_S, ends_s=ends_s()))
        cancelled = asyncio.ensure_future(in_turn(begun.append, "cancelled", ends_s=ends_s()))
        late = asyncio.ensure_future(in_turn(begun.append, "late", ends_s=time.monotonic()))
        last = asyncio.ensure_future(in_turn(begun.append, "last", ends_s=ends_s()))
        with pytest.raises(DeadlineExceededError):
            await late
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        free.set()
        await asyncio.gather(first, last)

    asyncio.run(run())
    assert begun == ["last"]
