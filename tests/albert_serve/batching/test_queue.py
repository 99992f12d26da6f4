"""The queue: the result of each caller, cancelled and expired requests, and closing."""

from __future__ import annotations

import asyncio
import random
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.batching.queue import Batcher, BatchObserver
from albert_serve.errors import DeadlineExceededError, EngineError, NotReadyError, QueueFullError
from tests.albert_serve.batching.engines import (
    POISON,
    FakeEngine,
    busy,
    make_input,
    make_limits,
    on_event_loop,
    submit,
)


@on_event_loop
async def test_cancelled_and_expired_requests_are_never_computed() -> None:
    """The observer gets the size of each batch, with and without padding."""
    engine, observer = FakeEngine(), Mock(BatchObserver)
    batcher = Batcher(engine, observer=observer)
    async with busy(engine, batcher, [1]):
        cancelled = await submit(batcher, [2])
        cancelled.cancel()
        expired = await submit(batcher, [3], deadline_s=0.02)
        errors = await asyncio.gather(cancelled, expired, return_exceptions=True)
        assert [type(error) for error in errors] == [asyncio.CancelledError, DeadlineExceededError]
        assert batcher.num_queued_tokens == 0
        calls = [await submit(batcher, ids) for ids in ([4] * 3, [5])]
    assert engine.batches == [[[1]], [[4] * 3, [5]]]
    assert all(call.done() for call in calls)
    observer.cancelled.assert_called_once_with("fill-mask")
    (report,) = observer.batch.call_args.args
    assert (report.num_inputs, report.num_tokens, report.num_padded_tokens) == (2, 4, 6)
    assert min(report.queue_delays_s["fill-mask"]) > 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_each_caller_gets_its_own_result_under_random_load(seed: int) -> None:
    chance = random.Random(seed)
    engine = FakeEngine(pause_s=0.0005)
    batcher = Batcher(engine, check_room=make_limits(max_queue_tokens=400).check_tokens)

    async def call(inputs: list[list[int]], deadline_s: float) -> None:
        try:
            answers = await batcher.run([make_input(ids) for ids in inputs], deadline_s)
        except EngineError:
            assert any(POISON in ids for ids in inputs)
        except DeadlineExceededError:
            assert deadline_s < 1
        except QueueFullError:
            pass
        else:
            assert [answer.tolist() for answer in answers] == [[ids] for ids in inputs]

    async def check() -> None:
        tasks = []
        for _ in range(30):
            inputs = [
                [chance.choice([*range(600), *[POISON] * 3])] * chance.choice([1, 5, 6, 40, 90])
                for _ in range(chance.randint(1, 4))
            ]
            deadline_s = chance.choice([10.0, 10.0, 0.001, 0.004])
            tasks.append(asyncio.create_task(call(inputs, deadline_s)))
            if chance.random() < 0.2:
                asyncio.get_running_loop().call_later(
                    chance.random() * 0.005, chance.choice(tasks).cancel
                )
            await asyncio.sleep(chance.choice([0, 0, 0, 0.001]))
        await asyncio.wait(tasks, timeout=20)
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        await batcher.close()
        assert batcher.num_queued_tokens == 0

    asyncio.run(check())
    for batch in engine.batches:
        assert len(batch) == 1 or len(batch) * max(map(len, batch)) <= engine.max_batch_tokens


@on_event_loop
async def test_closing_waits_for_accepted_requests_and_rejects_new_ones() -> None:
    engine = FakeEngine(max_batch_tokens=1)
    batcher = Batcher(engine)
    async with busy(engine, batcher, [0]) as running:
        accepted = [await submit(batcher, [number]) for number in range(1, 5)]
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        with pytest.raises(NotReadyError):
            await batcher.run([make_input([9])], 10.0)
    await closing
    answers = [call.result()[0].tolist() for call in (running, *accepted)]
    assert answers == [[[number]] for number in range(5)]
