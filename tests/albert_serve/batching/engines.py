"""An engine without a model, and requests to its queue."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
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
Call = asyncio.Task[list[Logits]]
POISON = 666


def on_event_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a coroutine test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class FakeEngine:
    """An engine that answers with the token ids, and fails on batches with the id POISON.

    It pauses in every second batch, so that other threads run in between.
    """

    def __init__(self, max_batch_tokens: int = 64, pause_s: float = 0.0) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._pause_s = pause_s
        self.batches: list[list[list[int]]] = []
        self.open = threading.Event()
        self.open.set()

    def run_batch(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        self.batches.append([item.ids for item in inputs])
        assert self.open.wait(timeout=10)
        time.sleep(self._pause_s * (len(self.batches) % 2))
        if any(POISON in item.ids for item in inputs):
            raise EngineError("poison")
        return [np.array([item.ids], np.float32) for item in inputs]


def make_input(ids: list[int]) -> EncoderInput:
    return EncoderInput(ids=ids, types=[0] * len(ids), task="fill-mask", rows=None)


def some_inputs(tasks: Sequence[str], seed: int = 0) -> list[EncoderInput]:
    """Return inputs of several lengths with random ids."""
    generator = np.random.default_rng(seed)
    return [
        EncoderInput(
            ids=generator.integers(5, 1000, n).tolist(), types=[0] * n, task=task, rows=[0]
        )
        for n, task in zip((3, 40, 17, 90, 1, 64), list(tasks) * 3, strict=False)
    ]


def make_limits(max_held_bytes: int = 1 << 20, **settings: Any) -> Limits:
    """Return the limits of a model with these settings."""
    large = LargeRequests(max_bytes=max_held_bytes)
    return Limits("tiny", Settings(bundle=Path("tiny"), **settings), large, BatchObserver())


@asynccontextmanager
async def busy(engine: FakeEngine, batcher: Batcher, ids: list[int]) -> AsyncIterator[Call]:
    """Block the engine with a request, which the body of the `with` statement gets."""
    engine.open.clear()
    num_batches = len(engine.batches)
    call = await submit(batcher, ids)
    while len(engine.batches) == num_batches:
        await asyncio.sleep(0.001)
    try:
        yield call
    finally:
        engine.open.set()
    await call
    await batcher.close()


async def submit(batcher: Batcher, ids: list[int], deadline_s: float = 10.0) -> Call:
    """Start a request, and let the event loop run until it is in the queue."""
    call = asyncio.create_task(batcher.run([make_input(ids)], deadline_s))
    for _ in range(3):
        await asyncio.sleep(0)
    return call
