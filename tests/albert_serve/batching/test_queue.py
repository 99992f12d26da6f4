"""The queue: the result of each caller, its limit, cancelled and expired requests, and closing."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.errors import DeadlineExceededError, EngineError, NotReadyError, QueueFullError
from albert_serve.tasks.base import EncoderInput, Logits
from tests.albert_serve.batching.engines import (
    POISON,
    FakeEngine,
    busy,
    make_batcher,
    make_input,
    on_event_loop,
    submit,
)


@on_event_loop
async def test_a_full_queue_rejects_requests_and_says_when_to_retry() -> None:
    engine = FakeEngine()
    batcher = make_batcher(engine, max_queue_tokens=100)
    async with busy(engine, batcher, [1] * 50):
        await submit(batcher, [2] * 90)
        with pytest.raises(QueueFullError, match=r"11 tokens .* 10 more tokens") as caught:
            await batcher.run([make_input([3] * 11)], 10.0)
        assert caught.value.retry_after_s == 1
        await submit(batcher, [3] * 10)
        with pytest.raises(QueueFullError, match=" 0 more tokens"):
            await batcher.run([make_input([3])], 10.0)
        assert batcher.num_queued_tokens == 100


@on_event_loop
async def test_cancelled_and_expired_requests_are_never_computed() -> None:
    engine = FakeEngine()
    batcher = make_batcher(engine)
    async with busy(engine, batcher, [1]):
        cancelled = await submit(batcher, [2])
        cancelled.cancel()
        expired = await submit(batcher, [3], deadline_s=0.02)
        errors = await asyncio.gather(cancelled, expired, return_exceptions=True)
        assert [type(error) for error in errors] == [asyncio.CancelledError, DeadlineExceededError]
        assert batcher.num_queued_tokens == 0
    assert engine.batches == [[[1]]]


class PausingEngine(FakeEngine):
    """An engine that pauses in every second batch, so that other threads run in between."""

    def run_batch(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        answers = super().run_batch(inputs)
        threading.Event().wait(0.0005 * (len(self.batches) % 2))
        return answers


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_each_caller_gets_its_own_result_under_random_load(seed: int) -> None:
    chance = random.Random(seed)
    engine = PausingEngine()
    batcher = make_batcher(engine, max_queue_tokens=400)

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
    batcher = make_batcher(engine)
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
