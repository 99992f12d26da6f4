"""The queue in front of the engine: it is never idle while something waits.

The engine has a thread, which chooses the next batch (scheduling.py) at the moment that it is free.
To choose takes microseconds, and whoever came, left or became late until then has been seen.
Callers are answered on the event loop.
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

from albert_serve.batching.events import BatchObserver, BatchReport, NoObserver
from albert_serve.batching.scheduler import PRIORITIES, Moment, Priority, Request, Scheduler
from albert_serve.batching.throughput import Pace
from albert_serve.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidInputError,
    NotReadyError,
    QueueFullError,
    TooMuchAtOnceError,
)
from albert_serve.tasks.base import EncoderInput, Logits


class Runner(Protocol):
    """What the batcher needs of an engine."""

    max_batch_tokens: int

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Logits of each input, in order; any exception fails the whole call."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class _Call(Request):
    inputs: Sequence[EncoderInput]
    arrived_s: float
    answer: asyncio.Future[list[Logits] | Exception]
    logits: dict[int, Logits] = field(default_factory=dict)
    closed: bool = False  # answered, or nobody is there to be

    @property
    def task(self) -> str:
        return self.inputs[0].task

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


_Members: TypeAlias = Sequence[tuple[_Call, int]]
_Outcomes: TypeAlias = Sequence[tuple[_Call, list[Logits] | Exception]]


class Batcher:
    """Runs the inputs of many callers in shared batches. Belongs to one event loop.

    Args:
        max_queue_tokens: the most tokens that may wait; batch jobs may fill half of it.
        max_wait_s: the longest that an interactive request may have to wait for its first turn, as
            far as can be told; past it requests are refused. It is never more than half of the
            time to a request's deadline, which alone bounds what batch jobs wait.
        batch_share: of the compute, for batch jobs while interactive requests wait too.
        call_cost_tokens: what one more call of the engine costs, as tokens of compute; a batch has
            no more padding than that.
        observer: is told what happens.
        clock: the seconds that deadlines are held against before anything is computed.

    Raises:
        ConfigError: a number is out of its range.
    """

    def __init__(
        self,
        engine: Runner,
        *,
        max_queue_tokens: int,
        max_wait_s: float = 1.0,
        batch_share: float = 0.2,
        call_cost_tokens: int = 16,
        observer: BatchObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_queue_tokens < 1:
            raise ConfigError(f"max_queue_tokens is {max_queue_tokens}; it must be 1 or more")
        if not max_wait_s > 0:
            raise ConfigError(f"max_wait_s is {max_wait_s}; it must be over 0")
        self.max_queue_tokens = max_queue_tokens
        self.max_wait_s = max_wait_s
        self._engine = engine
        self._observer: BatchObserver = NoObserver() if observer is None else observer
        self._clock = clock
        self._pace = Pace()
        self._scheduler: Scheduler[_Call] = Scheduler(
            call_cost_tokens=call_cost_tokens,
            batch_share=batch_share,
            turn_tokens=engine.max_batch_tokens,
        )
        self._lock = threading.Lock()  # over the scheduler and the next one
        self._is_working = False  # the thread will look at the queue again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._num_calls = 0
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._accepting = True

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that wait now, without padding."""
        return sum(self._scheduler.num_tokens(priority) for priority in PRIORITIES)

    def wait_s(self, priority: Priority = "interactive") -> float:
        """How long a request that came now would wait for its first turn; 0 if it is not known."""
        return self._scheduler.num_tokens_ahead(priority) * self._pace.usual_s_per_token

    async def run(
        self,
        inputs: Sequence[EncoderInput],
        deadline_s: float,
        *,
        priority: Priority = "interactive",
        is_begun: bool = False,
    ) -> list[Logits]:
        """Logits of each input, in order. If one fails or is given up, the others are dropped.

        Args:
            deadline_s: seconds from now after which the answer is of no use.
            priority: "batch" for what can wait until no interactive request does.
            is_begun: it goes on with what was let in before, and is not refused for the queue.

        Raises:
            QueueFullError: the queue has no room for all of them now, or they would wait too long.
            InvalidInputError: the queue would have no room for them even when empty, or there is
                no such priority.
            NotReadyError: the batcher is draining.
            DeadlineExceededError: there was no answer in time, or there could not have been one.
        """
        if not inputs:
            return []
        call = self._call(inputs, deadline_s, priority)
        self._enter(call, is_begun)
        try:
            self._observer.queued(call.task, call.num_tokens)
            await asyncio.wait({call.answer}, timeout=deadline_s)
            return _result(call)
        except DeadlineExceededError:
            self._observer.expired(call.task)
            raise
        except asyncio.CancelledError:
            self._observer.cancelled(call.task)
            raise
        finally:
            self._leave(call)

    async def drain(self) -> None:
        """Refuse new work, and return when all that was accepted is done."""
        self._accepting = False
        await self._none_left.wait()

    async def close(self) -> None:
        """Drain, and end the engine's thread."""
        await self.drain()
        # It may still compute what nobody waits for.
        await asyncio.to_thread(self._thread.shutdown)

    def _call(self, inputs: Sequence[EncoderInput], deadline_s: float, priority: Priority) -> _Call:
        if priority not in PRIORITIES:
            raise InvalidInputError(
                f"there is no priority {priority!r}; allowed are {' and '.join(PRIORITIES)}"
            )
        arrived_s = self._clock()
        return _Call(
            # An input without tokens is the engine's to refuse.
            lengths=[max(1, len(given.ids)) for given in inputs],
            priority=priority,
            inputs=inputs,
            arrived_s=arrived_s,
            ends_s=arrived_s + deadline_s,
            answer=asyncio.get_running_loop().create_future(),
        )

    def _enter(self, call: _Call, is_begun: bool) -> None:
        if not self._accepting:
            raise NotReadyError("the service is shutting down; send the request to another")
        with self._lock:
            if not is_begun:
                self._check_room(call)
                self._check_wait(call)
            self._scheduler.add(call)
            if self._scheduler.is_late(call, self._moment()):
                self._scheduler.remove(call)
                self._observer.expired(call.task)
                raise _late()
            must_start = not self._is_working
            self._is_working = True
        self._num_calls += 1
        self._none_left.clear()
        if must_start:
            # Not at once: who comes in the same turn of the loop runs along.
            call.answer.get_loop().call_soon(self._start)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, self._work, loop)

    def _leave(self, call: _Call) -> None:
        call.closed = True
        with self._lock:
            self._scheduler.remove(call)
        self._num_calls -= 1
        if not self._num_calls:
            self._none_left.set()

    def _check_room(self, call: _Call) -> None:
        num_tokens, limit = call.num_tokens, self.max_queue_tokens
        if call.priority == "batch":  # the other half is for interactive requests
            limit = (limit + 1) // 2
        if num_tokens > limit:
            raise TooMuchAtOnceError(
                f"the request has {num_tokens} tokens; at most {limit} are taken at once: split it"
            )
        num_queued = self.num_queued_tokens
        num_free = min(
            self.max_queue_tokens - num_queued,
            limit - self._scheduler.num_tokens(call.priority),
        )
        if num_tokens > num_free:
            self._observer.shed(call.task)
            raise QueueFullError(
                f"{num_queued} tokens are waiting and {num_tokens} more have no room: "
                f"{call.priority} requests may add {num_free}; try again later",
                retry_after_s=self._pace.retry_after_s(num_queued),
            )

    def _check_wait(self, call: _Call) -> None:
        """Refuse what would be late for what waits before it; the rest is the scheduler's."""
        wait_s, left_s = self.wait_s(call.priority), call.ends_s - self._clock()
        alone_s = call.num_tokens * self._pace.usual_s_per_token
        limit_s = left_s / 2
        if call.priority == "interactive":
            limit_s = min(self.max_wait_s, limit_s)
        whole_s = alone_s + wait_s * self._scheduler.num_turns(call.num_tokens)
        if alone_s < left_s and (wait_s > limit_s or whole_s > left_s):
            self._observer.shed(call.task)
            raise QueueFullError(
                f"the request would wait {wait_s:.2g} s for its turn, where {call.priority} "
                f"requests may wait {limit_s:.2g} s, and take {whole_s:.2g} s of the "
                f"{left_s:.2g} s to its deadline; try again later, or send less at once",
                retry_after_s=self._pace.retry_after_s(self.num_queued_tokens),
            )

    def _moment(self) -> Moment:
        return Moment(now_s=self._clock(), least_s_per_token=self._pace.least_s_per_token)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run batches until nothing waits. This and what it calls are on the engine's thread."""
        while True:
            with self._lock:
                batch = self._scheduler.take(
                    self._moment(), max_batch_tokens=self._engine.max_batch_tokens
                )
                self._is_working = bool(batch.members)
            if batch.given_up:
                _post(loop, _settle, [(call, _late()) for call in batch.given_up])
            if not batch.members:
                return
            self._compute(loop, batch.members)

    def _compute(self, loop: asyncio.AbstractEventLoop, members: _Members) -> None:
        """Answer each of a batch; if it fails as a whole, halve it until the culprit is alone."""
        started_s = self._clock()
        members = [(call, i) for call, i in members if not call.closed and call.ends_s > started_s]
        if not members:
            return
        try:
            answers = self._engine.run([call.inputs[index] for call, index in members])
            if len(answers) != len(members):
                raise EngineError(
                    f"the engine gave {len(answers)} results for {len(members)} inputs"
                )
        except Exception as error:  # noqa: BLE001  # it is handed to its caller
            if len(members) == 1:
                self._fail(loop, members[0][0], error)
                return
            middle = len(members) // 2
            self._compute(loop, members[:middle])
            self._compute(loop, members[middle:])
            return
        engine_s = self._clock() - started_s
        self._pace.measure(sum(call.lengths[index] for call, index in members), engine_s)
        for (call, index), logits in zip(members, answers, strict=True):
            call.logits[index] = logits
        _post(loop, self._answer, members, started_s, engine_s)

    def _fail(self, loop: asyncio.AbstractEventLoop, call: _Call, error: Exception) -> None:
        call.closed = True
        with self._lock:
            self._scheduler.remove(call)
        _post(loop, _settle, [(call, error)])

    def _answer(self, members: _Members, started_s: float, engine_s: float) -> None:
        """Hand over what is complete. On the event loop again."""
        _settle(
            [
                (call, [call.logits[index] for index in range(len(call.inputs))])
                for call in dict.fromkeys(call for call, _ in members)
                if len(call.logits) == len(call.inputs)
            ]
        )
        self._observer.batch(_report(members, started_s, engine_s))


def _result(call: _Call) -> list[Logits]:
    if not call.answer.done():
        raise _late()
    outcome = call.answer.result()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _late() -> DeadlineExceededError:
    return DeadlineExceededError(
        "no answer before the deadline; send less at once, or try again later"
    )


def _settle(outcomes: _Outcomes) -> None:
    for call, outcome in outcomes:
        if not call.answer.done():
            call.answer.set_result(outcome)


def _report(members: _Members, started_s: float, engine_s: float) -> BatchReport:
    lengths = [call.lengths[index] for call, index in members]
    delays_s: dict[str, list[float]] = {}
    for call, index in members:
        delays_s.setdefault(call.inputs[index].task, []).append(started_s - call.arrived_s)
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
    with contextlib.suppress(RuntimeError):  # the loop has ended, and all who waited with it
        loop.call_soon_threadsafe(callback, *args)
