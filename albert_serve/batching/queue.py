"""The queue in front of the engine. The engine is never idle while an input waits.

The engine's thread takes the next batch (scheduler.py) when it is free. Scheduling takes
microseconds, and considers every request that has arrived, disconnected or expired by then. The
event loop answers callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVarTuple, Unpack

from albert_serve.batching.scheduler import QueuedRequest, Scheduler
from albert_serve.errors import DeadlineExceededError, NotReadyError
from albert_serve.tasks.base import EncoderInput, Logits


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """A batch that the engine has run.

    Attributes:
        num_inputs: number of inputs in the batch.
        num_tokens: number of tokens in the inputs, without padding.
        num_padded_tokens: number of tokens in the inputs, with padding.
        engine_s: duration of the engine's computation, in seconds.
        queue_delays_s: time in seconds that each input waited, by task.
    """

    num_inputs: int
    num_tokens: int
    num_padded_tokens: int
    engine_s: float
    queue_delays_s: dict[str, list[float]]


class BatchObserver:
    """An observer that ignores all events. Its methods are called on the event loop.

    The task of a request is the endpoint of its first input.
    """

    def queued(self, task: str, num_tokens: int) -> None:
        """Record that a request entered the queue."""

    def batch(self, report: BatchReport) -> None:
        """Record that the engine ran a batch."""

    def cancelled(self, task: str) -> None:
        """Record that a request's caller disconnected before the answer."""

    def shed(self, task: str) -> None:
        """Record that a request was rejected because of load. `server/limits.py` calls this."""

    def expired(self, task: str) -> None:
        """Record that a request missed its deadline. `server/limits.py` calls this."""


class _BatchRunner(Protocol):
    """The interface of an engine that runs batches as the scheduler forms them."""

    max_batch_tokens: int

    def run_batch(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Return the logits of each input, in order. An exception fails the complete batch."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class _PendingRequest(QueuedRequest):
    inputs: Sequence[EncoderInput]
    arrived_s: float
    answer: asyncio.Future[list[Logits] | Exception]
    logits: dict[int, Logits] = field(default_factory=dict)
    closed: bool = False  # the request has failed, or its caller has an answer or has disconnected

    @property
    def task(self) -> str:
        return self.inputs[0].endpoint

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


_Members: TypeAlias = Sequence[tuple[_PendingRequest, int]]
_Outcomes: TypeAlias = Sequence[tuple[_PendingRequest, list[Logits] | Exception]]


class Batcher:
    """A queue for one event loop that runs the inputs of many callers in shared batches.

    Args:
        check_room: function of a request's tokens and the queued tokens, which raises an exception
            if the request does not fit in the queue.
        call_overhead_tokens: overhead of an engine call, as a number of tokens that take as long. A
            batch has at most as much padding.
        clock: clock in seconds, by which deadlines are checked before the engine computes.
    """

    def __init__(
        self,
        engine: _BatchRunner,
        *,
        check_room: Callable[[int, int], None] = lambda _num_tokens, _num_queued: None,
        call_overhead_tokens: int = 16,
        observer: BatchObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._observer = observer or BatchObserver()
        self._clock = clock
        self._scheduler: Scheduler[_PendingRequest] = Scheduler(
            max_batch_tokens=engine.max_batch_tokens, call_overhead_tokens=call_overhead_tokens
        )
        self._check_room = check_room
        self._lock = threading.Lock()  # protects the scheduler and `_is_working`
        self._is_working = False  # whether the thread will check the queue again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._num_calls = 0
        self._all_done = asyncio.Event()
        self._all_done.set()
        self._accepting = True

    @property
    def num_queued_tokens(self) -> int:
        """The number of queued tokens, without padding."""
        return self._scheduler.num_tokens

    async def run(
        self,
        inputs: Sequence[EncoderInput],
        deadline_s: float,
    ) -> list[Logits]:
        """Return the logits of each input, in order. If an input fails, the request fails.

        Args:
            deadline_s: seconds from now until the deadline.
        """
        if not inputs:
            return []
        call = self._call(inputs, deadline_s)
        self._enter(call)
        try:
            self._observer.queued(call.task, call.num_tokens)
            await asyncio.wait({call.answer}, timeout=deadline_s)
            return _result(call)
        except asyncio.CancelledError:
            self._observer.cancelled(call.task)
            raise
        finally:
            self._leave(call)

    async def close(self) -> None:
        """Reject new requests, answer the accepted requests, then end the engine's thread."""
        self._accepting = False
        await self._all_done.wait()
        # The thread may still compute an abandoned request.
        await asyncio.to_thread(self._thread.shutdown)

    def _call(self, inputs: Sequence[EncoderInput], deadline_s: float) -> _PendingRequest:
        arrived_s = self._clock()
        return _PendingRequest(
            # An input without tokens counts as one token until the engine rejects it.
            lengths=[max(1, len(item.ids)) for item in inputs],
            inputs=inputs,
            arrived_s=arrived_s,
            ends_s=arrived_s + deadline_s,
            answer=asyncio.get_running_loop().create_future(),
        )

    def _enter(self, call: _PendingRequest) -> None:
        if not self._accepting:
            raise NotReadyError("The service is shutting down. Send the request to a replica.")
        if not call.ends_s > self._clock():
            raise _deadline_error()
        with self._lock:
            self._check_room(call.num_tokens, self.num_queued_tokens)
            self._scheduler.add(call)
            must_start = not self._is_working
            self._is_working = True
        self._num_calls += 1
        self._all_done.clear()
        if must_start:
            # The start is deferred, so that requests of one event loop iteration share a batch.
            call.answer.get_loop().call_soon(self._start)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, self._work, loop)

    def _leave(self, call: _PendingRequest) -> None:
        call.closed = True
        with self._lock:
            self._scheduler.remove(call)
        self._num_calls -= 1
        if not self._num_calls:
            self._all_done.set()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run batches on the engine's thread until the queue is empty."""
        while True:
            with self._lock:
                batch = self._scheduler.take(self._clock())
                self._is_working = bool(batch.members)
            if batch.expired:
                _post(loop, _set_outcomes, [(call, _deadline_error()) for call in batch.expired])
            if not batch.members:
                return
            self._compute(loop, batch.members)

    def _compute(self, loop: asyncio.AbstractEventLoop, members: _Members) -> None:
        """Run a batch, bisecting it if it fails, so that only the failing input's request fails."""
        started_s = self._clock()
        members = [(call, i) for call, i in members if not call.closed and call.ends_s > started_s]
        if not members:
            return
        try:
            answers = self._engine.run_batch([call.inputs[index] for call, index in members])
            for (call, index), logits in zip(members, answers, strict=True):
                call.logits[index] = logits
        except Exception as error:  # noqa: BLE001  # `run` raises it
            if len(members) == 1:
                self._fail(loop, members[0][0], error)
                return
            middle = len(members) // 2
            self._compute(loop, members[:middle])
            self._compute(loop, members[middle:])
            return
        engine_s = self._clock() - started_s
        _post(loop, self._answer, members, started_s, engine_s)

    def _fail(
        self, loop: asyncio.AbstractEventLoop, call: _PendingRequest, error: Exception
    ) -> None:
        call.closed = True
        with self._lock:
            self._scheduler.remove(call)
        _post(loop, _set_outcomes, [(call, error)])

    def _answer(self, members: _Members, started_s: float, engine_s: float) -> None:
        """Answer the completed requests, on the event loop."""
        _set_outcomes(
            [
                (call, [call.logits[index] for index in range(len(call.inputs))])
                for call in dict.fromkeys(call for call, _ in members)
                if len(call.logits) == len(call.inputs)
            ]
        )
        self._observer.batch(_report(members, started_s, engine_s))


def _result(call: _PendingRequest) -> list[Logits]:
    if not call.answer.done():
        raise _deadline_error()
    outcome = call.answer.result()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _deadline_error() -> DeadlineExceededError:
    return DeadlineExceededError(
        "The answer missed the deadline. Send fewer inputs per request, or try again later."
    )


def _set_outcomes(outcomes: _Outcomes) -> None:
    for call, outcome in outcomes:
        if not call.answer.done():
            call.answer.set_result(outcome)


def _report(members: _Members, started_s: float, engine_s: float) -> BatchReport:
    lengths = [call.lengths[index] for call, index in members]
    delays_s: dict[str, list[float]] = {}
    for call, index in members:
        delays_s.setdefault(call.inputs[index].endpoint, []).append(started_s - call.arrived_s)
    return BatchReport(
        num_inputs=len(members),
        num_tokens=sum(lengths),
        num_padded_tokens=len(members) * max(lengths),
        engine_s=engine_s,
        queue_delays_s=delays_s,
    )


_Args = TypeVarTuple("_Args")


def _post(
    loop: asyncio.AbstractEventLoop, callback: Callable[[Unpack[_Args]], None], *args: *_Args
) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop has ended, and so have all callers
        loop.call_soon_threadsafe(callback, *args)
