"""Who waits and for how long: deadlines, priorities, and the time in Retry-After."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.batching.queue import Batcher
from albert_serve.batching.scheduler import Priority
from albert_serve.errors import (
    DeadlineExceededError,
    InvalidInputError,
    QueueFullError,
)
from tests.albert_serve.batching.engines import (
    FakeClock,
    FakeEngine,
    TimedEngine,
    busy,
    make_batcher,
    make_input,
    on_event_loop,
    started,
)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
@on_event_loop
async def test_cancelled_and_expired_work_is_never_computed(how: str) -> None:
    engine = FakeEngine()
    batcher = make_batcher(engine)
    async with busy(engine, batcher):
        late = await started(batcher, [2], deadline_s=0.02 if how == "expired" else 10.0)
        if how == "cancelled":
            late.cancel()
        (error,) = await asyncio.gather(late, return_exceptions=True)
        expected = DeadlineExceededError if how == "expired" else asyncio.CancelledError
        assert isinstance(error, expected)
        assert batcher.num_queued_tokens == 0
    assert engine.batches == [[[1]]]


@on_event_loop
async def test_a_batch_job_waits_for_the_interactive_requests_that_come_after_it() -> None:
    engine = FakeEngine(max_batch_tokens=10)
    batcher = make_batcher(engine)
    async with busy(engine, batcher, [0] * 10) as calls:
        calls.append(await started(batcher, [1] * 10, priority="batch"))
        calls.append(await started(batcher, [2] * 10))
    assert [batch[0][0] for batch in engine.batches] == [0, 2, 1]


@on_event_loop
async def test_batch_jobs_leave_half_of_the_queue_to_interactive_requests() -> None:
    engine = FakeEngine()
    batcher = make_batcher(engine, max_queue_tokens=100)
    async with busy(engine, batcher) as calls:
        with pytest.raises(InvalidInputError, match=r"101 tokens.*split"):
            await batcher.run([make_input([1] * 101)], 10.0)
        with pytest.raises(InvalidInputError, match="51 tokens; at most 50"):
            await batcher.run([make_input([1] * 51)], 10.0, priority="batch")
        calls.append(await started(batcher, [1] * 50, priority="batch"))
        with pytest.raises(QueueFullError, match="batch requests may add 0"):
            await batcher.run([make_input([1])], 10.0, priority="batch")
        calls.append(await started(batcher, [2] * 50))
        with pytest.raises(QueueFullError, match="interactive requests may add 0"):
            await batcher.run([make_input([2])], 10.0)


@on_event_loop
async def test_a_request_that_would_be_late_is_refused_unless_it_waits_alone() -> None:
    engine, batcher = await measured()
    async with busy(engine, batcher) as calls:
        calls.append(await started(batcher, [2] * 50, deadline_s=49.0))
        with pytest.raises(QueueFullError, match="take 1e\\+02 s of the 1e\\+02 s"):
            await batcher.run([make_input([3] * 54)], 103.0)
        calls.append(await started(batcher, [3] * 54, deadline_s=105.0))


@on_event_loop
async def test_batch_jobs_wait_longer_while_interactive_requests_do() -> None:
    engine, batcher = await measured()
    async with busy(engine, batcher) as calls:
        for _ in range(9):
            calls.append(await started(batcher, [2] * 15, 1e4, priority="batch"))
        calls.append(await started(batcher, [3], 100.0))
        assert not any(call.done() for call in calls)
        with pytest.raises(QueueFullError, match=r"wait 6.8e\+02 s for its turn"):
            await batcher.run([make_input([4] * 20)], 1000.0, priority="batch")


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 64), st.sampled_from(["interactive", "batch"])), max_size=20
    )
)
@on_event_loop
async def test_admitted_requests_are_answered_in_time_under_any_load(
    arrivals: list[tuple[int, Priority]],
) -> None:
    engine, batcher = await measured()
    async with busy(engine, batcher):
        calls = [
            await started(batcher, [2] * length, 1000.0, priority=priority)
            for length, priority in arrivals
        ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results} <= {list, QueueFullError}


@pytest.mark.parametrize(("num_queued", "retry_after_s"), [(20, 20), (400, 60)])
@on_event_loop
async def test_retry_after_is_the_queues_time_at_the_measured_rate(
    num_queued: int, retry_after_s: float
) -> None:
    engine, batcher = await measured(max_queue_tokens=num_queued)
    async with busy(engine, batcher) as calls:
        calls.append(await started(batcher, [2] * num_queued, deadline_s=1e6))
        with pytest.raises(QueueFullError) as caught:
            await batcher.run([make_input([3])], 10.0)
    assert caught.value.retry_after_s == pytest.approx(retry_after_s)


async def measured(*, max_queue_tokens: int = 100_000) -> tuple[TimedEngine, Batcher]:
    """An engine that is known to take a second a token."""
    clock = FakeClock()
    engine = TimedEngine(clock)
    batcher = Batcher(engine, max_queue_tokens=max_queue_tokens, clock=clock)
    await batcher.run([make_input([0])], 100.0)
    return engine, batcher
