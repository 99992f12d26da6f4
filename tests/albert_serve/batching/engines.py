"""Engines without a model, and requests to a queue in front of them."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np

from albert_serve.batching.queue import Batcher, BatchObserver
from albert_serve.errors import EngineError
from albert_serve.server.limits import LargeRequests, Limits
from albert_serve.settings import Settings
from albert_serve.tasks.base import EncoderInput, Logits

P = ParamSpec("P")
POISON = 666


def on_event_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class FakeEngine:
    """Answers with the ids themselves; fails on any batch with the id POISON in it."""

    def __init__(self, max_batch_tokens: int = 64) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.batches: list[list[list[int]]] = []
        self.open = threading.Event()
        self.open.set()

    def run_batch(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        self.batches.append([item.ids for item in inputs])
        assert self.open.wait(timeout=10)
        if any(POISON in item.ids for item in inputs):
            raise EngineError("poison")
        return [np.array([item.ids], np.float32) for item in inputs]


def make_input(ids: list[int]) -> EncoderInput:
    return EncoderInput(ids=ids, types=[0] * len(ids), task="fill-mask", rows=None)


def some_inputs(tasks: Sequence[str], seed: int = 0) -> list[EncoderInput]:
    """Inputs of several lengths with random ids."""
    generator = np.random.default_rng(seed)
    return [
        EncoderInput(
            ids=generator.integers(5, 1000, n).tolist(), types=[0] * n, task=task, rows=[0]
        )
        for n, task in zip((3, 40, 17, 90, 1, 64), list(tasks) * 3, strict=False)
    ]


def make_limits(**settings: Any) -> Limits:
    """The limits of a model with these settings; without them, the defaults."""
    large = LargeRequests(max_bytes=settings.pop("max_held_bytes", 1 << 20))
    return Limits("tiny", Settings(bundle=Path("tiny"), **settings), large, BatchObserver())


def make_batcher(engine: FakeEngine, max_queue_tokens: int = 1_000_000) -> Batcher:
    limits = make_limits(max_queue_tokens=max_queue_tokens)
    return Batcher(engine, check_room=limits.check_tokens)


async def occupied(
    engine: FakeEngine, batcher: Batcher, ids: list[int]
) -> asyncio.Task[list[Logits]]:
    """A request that the engine is busy with."""
    num_batches = len(engine.batches)
    running = await started(batcher, ids)
    while len(engine.batches) == num_batches:
        await asyncio.sleep(0.001)
    return running


@asynccontextmanager
async def busy(
    engine: FakeEngine, batcher: Batcher, ids: Sequence[int] = (1,)
) -> AsyncIterator[list[asyncio.Task[list[Logits]]]]:
    """Keep the engine busy with a request; afterwards that, and those noted, are answered."""
    engine.open.clear()
    running = await occupied(engine, batcher, list(ids))
    calls: list[asyncio.Task[list[Logits]]] = []
    try:
        yield calls
    finally:
        engine.open.set()
    await asyncio.gather(running, *calls)
    await batcher.close()


async def started(
    batcher: Batcher, ids: list[int], deadline_s: float = 10.0
) -> asyncio.Task[list[Logits]]:
    """A request that has been queued, or is running."""
    call = batcher.run([make_input(ids)], deadline_s)
    running = asyncio.create_task(call)
    for _ in range(3):
        await asyncio.sleep(0)
    return running
