"""The queue: whose result is whose, the budget, the bound, what becomes of bad and late work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.batcher import Batcher
from albert_serve.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidInputError,
    NotReadyError,
    QueueFullError,
)
from albert_serve.tasks.base import EncoderInput, Logits

POISON = 666


class FakeEngine:
    """Answers with the ids themselves; fails on any batch with the id POISON in it."""

    def __init__(self, max_batch_tokens: int = 64) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.batches: list[list[list[int]]] = []
        self.open = threading.Event()
        self.open.set()

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        self.batches.append([given.ids for given in inputs])
        assert self.open.wait(timeout=10)
        if any(POISON in given.ids for given in inputs):
            raise EngineError("poison")
        return [expected_logits(given) for given in inputs]


def expected_logits(item: EncoderInput) -> Logits:
    return np.array([item.ids], np.float32)


def make_input(ids: list[int]) -> EncoderInput:
    return EncoderInput(ids=ids, types=[0] * len(ids), task="fill-mask", rows=None)


def make_batcher(engine: FakeEngine, max_queue_tokens: int = 1_000_000) -> Batcher:
    return Batcher(engine, max_queue_tokens=max_queue_tokens)


async def outcomes(
    batcher: Batcher, callers: Sequence[list[list[int]]]
) -> list[list[Logits] | BaseException]:
    work = (batcher.run([make_input(ids) for ids in caller], 10.0) for caller in callers)
    results = await asyncio.gather(*work, return_exceptions=True)
    await batcher.close()
    return list(results)


id_lists = st.lists(st.integers(0, 600), min_size=1, max_size=90)
callers_lists = st.lists(st.lists(id_lists, min_size=1, max_size=4), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(callers=callers_lists)
def test_every_caller_gets_its_own_results_in_order(callers: list[list[list[int]]]) -> None:
    engine = FakeEngine()
    results = asyncio.run(outcomes(make_batcher(engine), callers))
    for caller, result in zip(callers, results, strict=True):
        assert isinstance(result, list)
        assert [logits.tolist() for logits in result] == [[ids] for ids in caller]


@settings(max_examples=60, deadline=None)
@given(callers=callers_lists)
def test_no_batch_is_over_the_budget_unless_one_input_is(callers: list[list[list[int]]]) -> None:
    engine = FakeEngine()
    asyncio.run(outcomes(make_batcher(engine), callers))
    for batch in engine.batches:
        padded = len(batch) * max(map(len, batch))
        assert padded <= engine.max_batch_tokens or len(batch) == 1
    ran = sorted(ids for batch in engine.batches for ids in batch)
    assert ran == sorted(ids for caller in callers for ids in caller)


@settings(max_examples=60, deadline=None)
@given(callers=callers_lists, poisoned=st.sets(st.integers(0, 19)))
def test_poison_fails_alone(callers: list[list[list[int]]], poisoned: set[int]) -> None:
    callers = [
        [[POISON], *caller] if index in poisoned else caller for index, caller in enumerate(callers)
    ]
    results = asyncio.run(outcomes(make_batcher(FakeEngine()), callers))
    for index, result in enumerate(results):
        assert isinstance(result, EngineError if index in poisoned else list)


def test_the_oldest_is_in_the_next_batch_and_like_lengths_are_with_it() -> None:
    async def check() -> None:
        engine = FakeEngine(max_batch_tokens=40)
        batcher = make_batcher(engine)
        lengths = [20, 3, 19, 4, 5, 3]
        await outcomes(batcher, [[[7] * length] for length in lengths])
        assert [[len(ids) for ids in batch] for batch in engine.batches] == [
            [20, 19],
            [3, 3, 4, 5],
        ]

    asyncio.run(check())


def test_a_full_queue_refuses_with_a_time_and_takes_work_again_when_drained() -> None:
    async def check() -> None:
        engine = FakeEngine()
        batcher = make_batcher(engine, max_queue_tokens=100)
        engine.open.clear()
        running = await started(batcher, [1] * 50)
        queued = await started(batcher, [2] * 90)
        with pytest.raises(QueueFullError, match="90 tokens are waiting and 11 more") as caught:
            await batcher.run([make_input([3] * 11)], 10.0)
        assert caught.value.retry_after_s >= 1
        assert batcher.num_queued_tokens == 90
        engine.open.set()
        await asyncio.gather(running, queued)
        assert len(await batcher.run([make_input([3] * 11)], 10.0)) == 1
        await batcher.close()

    asyncio.run(check())


def test_a_request_larger_than_the_queue_is_told_to_split() -> None:
    async def check() -> None:
        batcher = make_batcher(FakeEngine(), max_queue_tokens=100)
        with pytest.raises(InvalidInputError, match=r"101 tokens.*split"):
            await batcher.run([make_input([1] * 101)], 10.0)

    asyncio.run(check())


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_work_given_up_is_never_computed(how: str) -> None:
    async def check() -> None:
        engine = FakeEngine()
        batcher = make_batcher(engine)
        engine.open.clear()
        running = await started(batcher, [1])
        late = await started(batcher, [2], deadline_s=0.02 if how == "expired" else 10.0)
        if how == "cancelled":
            late.cancel()
        (outcome,) = await asyncio.gather(late, return_exceptions=True)
        expected = DeadlineExceededError if how == "expired" else asyncio.CancelledError
        assert isinstance(outcome, expected)
        assert batcher.num_queued_tokens == 0
        engine.open.set()
        await running
        await batcher.close()
        assert engine.batches == [[[1]]]

    asyncio.run(check())


def test_draining_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    async def check() -> None:
        engine = FakeEngine(max_batch_tokens=1)
        batcher = make_batcher(engine)
        engine.open.clear()
        accepted = [await started(batcher, [number]) for number in range(5)]
        draining = asyncio.create_task(batcher.drain())
        await asyncio.sleep(0)
        with pytest.raises(NotReadyError):
            await batcher.run([make_input([9])], 10.0)
        engine.open.set()
        await draining
        assert [task.result()[0].tolist() for task in accepted] == [[[n]] for n in range(5)]
        await batcher.close()

    asyncio.run(check())


async def started(
    batcher: Batcher, ids: list[int], deadline_s: float = 10.0
) -> asyncio.Task[list[Logits]]:
    """A request that has been queued, or is running."""
    task = asyncio.create_task(batcher.run([make_input(ids)], deadline_s))
    for _ in range(3):
        await asyncio.sleep(0)
    return task
