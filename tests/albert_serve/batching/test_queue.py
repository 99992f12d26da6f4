"""The queue: whose result is whose, the budget, the bound, what becomes of bad and late work."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.batching.queue import BatchReport
from albert_serve.errors import DeadlineExceededError, EngineError, NotReadyError, QueueFullError
from albert_serve.tasks.base import EncoderInput, Logits
from tests.albert_serve.batching.engines import (
    POISON,
    Diary,
    FakeClock,
    FakeEngine,
    busy,
    make_batcher,
    make_input,
    occupied,
    on_event_loop,
    started,
)


@on_event_loop
async def test_a_full_queue_refuses_with_a_time() -> None:
    engine = FakeEngine()
    batcher = make_batcher(engine, max_queue_tokens=100)
    async with busy(engine, batcher, [1] * 50) as calls:
        calls.append(await started(batcher, [2] * 90))
        with pytest.raises(QueueFullError, match=r"11 tokens .* 10 more tokens") as caught:
            await batcher.run([make_input([3] * 11)], 10.0)
        assert caught.value.retry_after_s == 1
        calls.append(await started(batcher, [3] * 10))
        with pytest.raises(QueueFullError, match=" 0 more tokens"):
            await batcher.run([make_input([3])], 10.0)
        assert batcher.num_queued_tokens == 100


@on_event_loop
async def test_no_inputs_and_no_time_do_not_enter_the_queue() -> None:
    engine, diary = FakeEngine(), Diary()
    batcher = make_batcher(engine, observer=diary)
    assert await batcher.run([], 10.0) == []
    with pytest.raises(DeadlineExceededError):
        await batcher.run([make_input([1])], 0.0)
    await batcher.close()
    assert (engine.batches, diary.counts) == ([], {})


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
async def test_a_request_that_expires_in_the_queue_ends_when_its_turn_comes() -> None:
    engine, clock = FakeEngine(), FakeClock()
    batcher = make_batcher(engine, clock=clock)
    async with busy(engine, batcher):
        late = await started(batcher, [2], deadline_s=1000.0)
        clock.now_s += 1000.0
        engine.open.set()
        with pytest.raises(DeadlineExceededError):
            await asyncio.wait_for(late, 10.0)
    assert engine.batches == [[[1]]]


@on_event_loop
async def test_what_is_late_when_its_batch_has_failed_is_not_computed_again() -> None:
    clock = FakeClock()

    class SlowEngine(FakeEngine):
        def run_batch(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
            clock.now_s += 2.0
            return super().run_batch(inputs)

    engine = SlowEngine()
    batcher = make_batcher(engine, max_queue_tokens=100, clock=clock)
    calls = [batcher.run([make_input(ids)], 1.0) for ids in ([POISON], [1])]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    await batcher.close()
    assert [type(error) for error in errors] == [DeadlineExceededError] * 2
    assert engine.batches == [[[POISON], [1]]]


def test_a_loop_that_ends_while_the_engine_runs_leaves_nothing_behind() -> None:
    engine = FakeEngine()
    engine.open.clear()
    batcher = make_batcher(engine)

    async def check() -> None:
        await occupied(engine, batcher, [1])

    asyncio.run(check())
    engine.open.set()
    asyncio.run(batcher.close())
    assert batcher.num_queued_tokens == 0


def report(num_inputs: int, num_tokens: int, num_padded_tokens: int, **times: Any) -> BatchReport:
    sizes: Any = {"num_inputs": num_inputs, "num_tokens": num_tokens}
    return BatchReport(**sizes, num_padded_tokens=num_padded_tokens, **{"engine_s": 0.0, **times})


def test_an_observer_sees_every_event() -> None:
    async def check() -> None:
        engine, clock, diary = FakeEngine(), FakeClock(), Diary()
        batcher = make_batcher(engine, max_queue_tokens=60, clock=clock, observer=diary)
        engine.open.clear()
        running = await occupied(engine, batcher, [0] * 9)
        calls = [
            await started(batcher, [1] * 20, task="sentence-order"),
            await started(batcher, [2] * 18),
        ]
        clock.now_s += 3
        cancelled = await started(batcher, [4] * 20, task="text-classification")
        cancelled.cancel()
        await asyncio.wait({cancelled})
        engine.open.set()
        await asyncio.gather(running, *calls)
        await batcher.close()
        assert diary.counts == {
            ("queued", "fill-mask"): 2,
            ("queued", "sentence-order"): 1,
            ("queued", "text-classification"): 1,
            ("cancelled", "text-classification"): 1,
        }
        assert diary.queued_tokens == [9, 20, 18, 20]
        assert diary.reports == [
            report(1, 9, 9, engine_s=3.0, queue_delays_s={"fill-mask": [0.0]}),
            report(2, 38, 40, queue_delays_s={"sentence-order": [3.0], "fill-mask": [3.0]}),
        ]

    asyncio.run(check(), debug=True)  # it refuses what is not on the loop's own thread


class RestlessEngine(FakeEngine):
    """Now and then gives up the thread in the middle of a batch, so that everything interleaves."""

    def run_batch(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        answers = super().run_batch(inputs)
        threading.Event().wait(0.0005 * (len(self.batches) % 2))
        return answers


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_under_random_load_each_caller_has_the_right_result(seed: int) -> None:
    chance = random.Random(seed)
    engine, diary = RestlessEngine(), Diary()
    batcher = make_batcher(engine, max_queue_tokens=400, observer=diary)

    async def call(inputs: list[list[int]], deadline_s: float) -> str:
        try:
            encoder_inputs = [make_input(ids) for ids in inputs]
            answers = await batcher.run(encoder_inputs, deadline_s)
        except EngineError:
            assert any(POISON in ids for ids in inputs)
            return "failed"
        except QueueFullError:
            return "shed"
        except DeadlineExceededError:
            assert deadline_s < 1
            return "expired"
        assert [answer.tolist() for answer in answers] == [[ids] for ids in inputs]
        return "answered"

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
        outcomes = Counter("cancelled" if task.cancelled() else task.result() for task in tasks)
        await batcher.close()
        assert batcher.num_queued_tokens == 0
        assert diary.counts["cancelled", "fill-mask"] <= outcomes["cancelled"]

    asyncio.run(check())
    for batch in engine.batches:
        assert len(batch) == 1 or len(batch) * max(map(len, batch)) <= engine.max_batch_tokens


@pytest.mark.parametrize("is_cancelled", [False, True])
@on_event_loop
async def test_closing_waits_for_what_runs_and_refuses_what_comes(is_cancelled: bool) -> None:
    """Of a caller who has left, too: the engine still works on it."""
    engine = FakeEngine(max_batch_tokens=1)
    batcher = make_batcher(engine)
    engine.open.clear()
    running = await occupied(engine, batcher, [0])
    accepted = [await started(batcher, [number]) for number in range(1, 5)]
    if is_cancelled:
        for call in (running, *accepted):
            call.cancel()
        await asyncio.wait({running, *accepted})
    closing = asyncio.create_task(batcher.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    with pytest.raises(NotReadyError):
        await batcher.run([make_input([9])], 10.0)
    engine.open.set()
    await closing
    assert is_cancelled or [call.result()[0].tolist() for call in accepted] == [
        [[number]] for number in range(1, 5)
    ]
