"""The queue in front of the engine: a budget in tokens, like lengths together, nothing waits idle.

One worker runs one batch at a time. When it is free the next batch starts at once: the oldest
input seeds it and those nearest to it in length fill it, so that no input starves and little is
padded. Work whose caller is gone or out of time leaves the queue before it is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

from albert_serve.errors import (
    DeadlineExceededError,
    InvalidInputError,
    NotReadyError,
    QueueFullError,
)
from albert_serve.tasks.base import EncoderInput, Logits

_RETRY_AFTER_S: Final = (1.0, 60.0)
_RATE_SMOOTHING: Final = 0.2


class Runner(Protocol):
    """What the batcher needs of an engine."""

    max_batch_tokens: int

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Logits of each input, in order; any exception fails the whole call."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class _Waiting:
    given: EncoderInput
    answer: asyncio.Future[Logits]

    @property
    def num_tokens(self) -> int:
        return len(self.given.ids)


class Batcher:
    """Runs the inputs of many callers in shared batches. Belongs to one event loop.

    Args:
        max_queue_tokens: the most tokens that may wait.

    Attributes:
        num_queued_tokens: tokens that wait now.
    """

    def __init__(self, engine: Runner, *, max_queue_tokens: int) -> None:
        self.max_queue_tokens = max_queue_tokens
        self.num_queued_tokens = 0
        self._engine = engine
        self._queue: dict[_Waiting, None] = {}  # in order of arrival; removal is O(1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._worker: asyncio.Task[None] | None = None
        self._tokens_per_s: float | None = None
        self._accepting = True

    async def run(self, inputs: Sequence[EncoderInput], deadline_s: float) -> list[Logits]:
        """Logits of each input, in order. If one fails or is given up, the others are dropped.

        Args:
            deadline_s: seconds from now after which the answer is of no use.

        Raises:
            QueueFullError: the queue has no room for all of them now.
            InvalidInputError: the queue would have no room for them even when empty.
            NotReadyError: the batcher is draining.
            DeadlineExceededError: there was no answer in time.
        """
        self._admit(sum(len(given.ids) for given in inputs))
        loop = asyncio.get_running_loop()
        mine = [_Waiting(given=given, answer=loop.create_future()) for given in inputs]
        for waiting in mine:
            self._queue[waiting] = None
            self.num_queued_tokens += waiting.num_tokens
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.gather(*(waiting.answer for waiting in mine))
        except TimeoutError:
            raise DeadlineExceededError(
                "no answer before the deadline; send less at once, or try again later"
            ) from None
        finally:
            for waiting in mine:
                self._remove(waiting)
                waiting.answer.cancel()

    async def drain(self) -> None:
        """Refuse new work, and return when all that was accepted is done."""
        self._accepting = False
        if self._worker is not None:
            await asyncio.wait({self._worker})

    async def close(self) -> None:
        """Drain, and end the worker's thread."""
        await self.drain()
        self._thread.shutdown()

    def _admit(self, num_tokens: int) -> None:
        if not self._accepting:
            raise NotReadyError("the service is shutting down; send the request to another")
        if num_tokens > self.max_queue_tokens:
            raise InvalidInputError(
                f"the request has {num_tokens} tokens; at most {self.max_queue_tokens} are taken "
                "at once: split it"
            )
        if self.num_queued_tokens + num_tokens > self.max_queue_tokens:
            raise QueueFullError(
                f"{self.num_queued_tokens} tokens are waiting and {num_tokens} more are over the "
                f"limit of {self.max_queue_tokens}; try again later",
                retry_after_s=self._seconds_to_empty(),
            )

    def _seconds_to_empty(self) -> float:
        least, most = _RETRY_AFTER_S
        if self._tokens_per_s is None:
            return least
        return min(most, max(least, self.num_queued_tokens / self._tokens_per_s))

    async def _work(self) -> None:
        while self._queue:
            await self._run_batch(self._take())

    def _take(self) -> list[_Waiting]:
        """Remove the next batch from the queue: within the budget, or a single input over it."""
        oldest = next(iter(self._queue))
        batch: list[_Waiting] = []
        longest = 0
        # Sorting is stable: of equally fitting inputs the older one goes first.
        for waiting in sorted(
            self._queue, key=lambda waiting: abs(waiting.num_tokens - oldest.num_tokens)
        ):
            longest = max(longest, waiting.num_tokens)
            if batch and longest * (len(batch) + 1) > self._engine.max_batch_tokens:
                break
            batch.append(waiting)
        for waiting in batch:
            self._remove(waiting)
        return batch

    async def _run_batch(self, batch: list[_Waiting]) -> None:
        """Answer each of a batch; if it fails as a whole, halve it until the culprit is alone."""
        batch = [waiting for waiting in batch if not waiting.answer.done()]
        if not batch:
            return
        started_s = time.monotonic()
        try:
            answers = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._engine.run, [waiting.given for waiting in batch]
            )
        except Exception as error:  # noqa: BLE001  # it is handed to its caller
            if len(batch) == 1:
                _settle(batch[0], error)
                return
            middle = len(batch) // 2
            await self._run_batch(batch[:middle])
            await self._run_batch(batch[middle:])
            return
        self._measure(sum(w.num_tokens for w in batch), time.monotonic() - started_s)
        for waiting, logits in zip(batch, answers, strict=True):
            _settle(waiting, logits)

    def _measure(self, num_tokens: int, elapsed_s: float) -> None:
        rate = num_tokens / max(elapsed_s, 1e-6)
        before = rate if self._tokens_per_s is None else self._tokens_per_s
        self._tokens_per_s = before + _RATE_SMOOTHING * (rate - before)

    def _remove(self, waiting: _Waiting) -> None:
        if waiting in self._queue:
            del self._queue[waiting]
            self.num_queued_tokens -= waiting.num_tokens


def _settle(waiting: _Waiting, outcome: Logits | Exception) -> None:
    if waiting.answer.done():  # its caller is gone
        return
    if isinstance(outcome, Exception):
        waiting.answer.set_exception(outcome)
    else:
        waiting.answer.set_result(outcome)
