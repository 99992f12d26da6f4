"""Large requests have one thread together, and what is cancelled before its turn never begins."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from albert_serve.errors import DeadlineExceededError
from albert_serve.server.process.threads import run_in_thread

SOON_S = 20.0


def ends_s() -> float:
    return time.monotonic() + SOON_S


def thread_name(all_here: threading.Barrier | None = None) -> str:
    if all_here is not None:
        all_here.wait(SOON_S)
    return threading.current_thread().name


def test_large_requests_have_one_thread_and_others_several() -> None:
    async def run() -> tuple[list[str], list[str]]:
        both = threading.Barrier(2)  # which one thread alone would not pass
        small = (run_in_thread(thread_name, both, ends_s=ends_s()) for _ in range(2))
        large = (run_in_thread(thread_name, ends_s=ends_s(), is_large=True) for _ in range(4))
        return await asyncio.gather(*small), await asyncio.gather(*large)

    small, large = asyncio.run(run())
    assert len(set(small)) == 2
    assert len(set(large)) == 1
    assert not set(small) & set(large)


def test_what_is_cancelled_before_its_turn_never_begins() -> None:
    begun: list[str] = []

    async def run() -> None:
        free = threading.Event()
        first = asyncio.ensure_future(
            run_in_thread(free.wait, SOON_S, ends_s=ends_s(), is_large=True)
        )
        cancelled = asyncio.ensure_future(
            run_in_thread(begun.append, "cancelled", ends_s=ends_s(), is_large=True)
        )
        late = asyncio.ensure_future(
            run_in_thread(begun.append, "late", ends_s=time.monotonic(), is_large=True)
        )
        last = asyncio.ensure_future(
            run_in_thread(begun.append, "last", ends_s=ends_s(), is_large=True)
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
