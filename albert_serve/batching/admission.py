"""Admission control: whether a request is answered (200) or refused (429), and why.

Three rules, in the order in which a request meets them. Each knows what the one before it could
not, and each refuses with a `QueueFullError`:

1. `ConcurrencyLimiter`: the number of requests in progress, before the body is read;
2. `QueueAdmission`, room: the tokens of the request and of the queue, once they are counted;
3. `QueueAdmission`, wait: the expected wait for the engine at its usual throughput.

`server/concurrency_gate.py` applies the first to HTTP requests, `Batcher` the others. Between them
`server/large_requests.py` refuses large bodies that have no room, or that cannot be read in time.
An admitted request may still miss its deadline (504).

The first rule is the one that counts under overload. Reading, validating and tokenising a request
costs far more than refusing it, and a parsed request waits for the CPU even while the engine's
queue is short; so the bound of the queue is not enough. It is an adaptive concurrency limit, of the
family of AIMD (TCP Reno) and gradient limits (TCP Vegas; Netflix's concurrency-limits). These probe
for the limit: they raise it until losses or latencies grow. Here the throughput is measured, and
Little's law gives the limit of a wanted latency at once, with no phase of overload to learn from.

`RefusalPacer` decides when a refusal is sent.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from albert_serve.batching.scheduler import PRIORITIES, QueuedRequest, Scheduler
from albert_serve.errors import QueueFullError, TooMuchAtOnceError

_BUSY_REQUESTS: Final = 16  # enough concurrent requests to saturate the service
_IDLE_REQUESTS: Final = 4  # below this the throughput is bounded by arrivals
# The floor of the limit: 64 callers in a closed loop are admitted, however slow the model.
_MIN_LIMIT: Final = 72
# The floor under overload, when more requests are refused than answered.
_MIN_LIMIT_OVERLOADED: Final = 32
_INITIAL_LIMIT: Final = 128  # until the throughput has been measured
_WINDOW_S: Final = 1.0  # many iterations of the event loop, which answers in bursts
_SMOOTHING: Final = 0.3
_BATCH_SMOOTHING: Final = 0.2  # batches differ more than windows
_RETRY_AFTER_S: Final = (1.0, 60.0)
# Refusals in excess of the rate are delayed, by no more than the least Retry-After.
_REFUSALS_PER_S: Final = 100.0
_MAX_REFUSAL_DELAY_S: Final = 1.0
_REFUSAL_TICK_S: Final = 0.05


class ConcurrencyLimiter:
    """A concurrency limit that keeps the expected latency within a bound.

    By Little's law the latency of a new request is the number of concurrent requests divided by
    the throughput. The throughput is measured while enough requests are in progress to saturate
    the service, whatever its bottleneck. Refused and invalid requests cost less than answers, so a
    window with more of these than of answers is not used.

    Args:
        max_latency_s: the bound.
        clock: in seconds.

    Attributes:
        num_requests: the requests in progress.
    """

    def __init__(self, max_latency_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_requests = 0
        self._max_latency_s = max_latency_s
        self._clock = clock
        self._per_s = 0.0
        self._window_start_s: float | None = None
        self._num_answered = self._num_late = self._num_others = self._num_refused = 0
        self._min_limit = _MIN_LIMIT

    @property
    def limit(self) -> int:
        """The concurrency limit."""
        if not self._per_s:
            return _INITIAL_LIMIT
        return max(self._min_limit, int(self._per_s * self._max_latency_s))

    @property
    def expected_latency_s(self) -> float:
        """The latency of a request admitted now; 0 before the throughput is known."""
        return self.num_requests / self._per_s if self._per_s else 0.0

    def is_full(self) -> bool:
        """Whether the limit is reached, so that no request is to be admitted."""
        return self.num_requests >= self.limit

    def admit(self) -> None:
        """Count a request as in progress."""
        self.num_requests += 1
        if self._window_start_s is None and self.num_requests >= _BUSY_REQUESTS:
            self._start_window()

    def pause(self) -> None:
        """Stop counting a request as in progress: it is not read yet, or was refused unread."""
        self.num_requests -= 1

    def resume(self) -> None:
        """Count a paused request as in progress again, even if the limit is reached by now."""
        self.num_requests += 1

    def refuse(self) -> QueueFullError:
        """Count a refused request, and return its error."""
        self._num_refused += 1
        latency_s = self.expected_latency_s
        return QueueFullError(
            f"{self.num_requests} requests are being answered, which takes {latency_s:.2g} s; "
            f"{self.limit} are taken at once; try again later",
            retry_after_s=limit_retry_after_s(latency_s),
        )

    def release(self, status: int | None = HTTPStatus.OK) -> None:
        """Count a request as done, by the status of its reply; None if it has no reply."""
        self.num_requests -= 1
        if status == HTTPStatus.GATEWAY_TIMEOUT:
            self._num_late += 1
        elif status is not None and status < HTTPStatus.BAD_REQUEST:
            self._num_answered += 1
        else:
            self._num_others += 1
        if self._window_start_s is None:
            return
        if self.num_requests < _IDLE_REQUESTS:  # the next request may come much later
            self._window_start_s = None
            return
        elapsed_s = self._clock() - self._window_start_s
        if elapsed_s < _WINDOW_S:
            return
        self._window_start_s = None
        if self.num_requests >= _BUSY_REQUESTS // 2:  # else arrivals bounded the throughput
            num_done = self._num_answered + self._num_late
            if self._num_others <= num_done:
                self._update_throughput(self._num_answered / elapsed_s)
            is_overloaded = self._num_refused > num_done
            self._min_limit = _MIN_LIMIT_OVERLOADED if is_overloaded else _MIN_LIMIT
            self._start_window()

    def _start_window(self) -> None:
        self._window_start_s = self._clock()
        self._num_answered = self._num_late = self._num_others = self._num_refused = 0

    def _update_throughput(self, per_s: float) -> None:
        self._per_s += _SMOOTHING * (per_s - self._per_s) if self._per_s else per_s


class QueueAdmission:
    """The limits of the engine's queue, in tokens and in time.

    Args:
        scheduler: the queue.
        max_tokens: the limit of queued tokens; batch jobs may fill half of it.
    """

    def __init__(self, scheduler: Scheduler[Any], *, max_tokens: int) -> None:
        self._scheduler = scheduler
        self._max_tokens = max_tokens
        self._tokens_per_s = 0.0  # of the engine, without padding; 0 until it is measured

    def measure(self, num_tokens: int, elapsed_s: float) -> None:
        """Update the engine's throughput with a batch."""
        rate = num_tokens / max(elapsed_s, 1e-6)
        before = self._tokens_per_s or rate
        self._tokens_per_s = before + _BATCH_SMOOTHING * (rate - before)

    @property
    def num_queued_tokens(self) -> int:
        """Queued tokens, without padding."""
        return sum(self._scheduler.num_tokens(priority) for priority in PRIORITIES)

    def check(self, request: QueuedRequest, left_s: float) -> None:
        """Refuse a request that has no room in the queue, or that would wait too long in it.

        Args:
            left_s: the time to its deadline.

        Raises:
            TooMuchAtOnceError: it exceeds even an empty queue.
            QueueFullError: there is no room for all of it now, or it would wait too long.
        """
        self._check_room(request)
        self._check_wait(request, left_s)

    def _check_room(self, request: QueuedRequest) -> None:
        num_tokens, limit = request.num_waiting_tokens, self._max_tokens
        if request.priority == "batch":  # half is reserved for interactive requests
            limit = (limit + 1) // 2
        if num_tokens > limit:
            raise TooMuchAtOnceError(
                f"the request has {num_tokens} tokens; at most {limit} are taken at once: split it"
            )
        num_queued = self.num_queued_tokens
        num_free = min(
            self._max_tokens - num_queued,
            limit - self._scheduler.num_tokens(request.priority),
        )
        if num_tokens > num_free:
            raise self._refusal(
                f"{num_queued} tokens are waiting and {num_tokens} more have no room: "
                f"{request.priority} requests may add {num_free}; try again later"
            )

    def _check_wait(self, request: QueuedRequest, left_s: float) -> None:
        """Refuse a request that would wait for half of its time, or be late, by those before it."""
        num_tokens = request.num_waiting_tokens
        wait_s = self._seconds(self._scheduler.num_tokens_ahead(request.priority, num_tokens))
        limit_s = left_s / 2
        num_slots = math.ceil(num_tokens / self._scheduler.max_batch_tokens)
        whole_s = self._seconds(num_tokens) + wait_s * num_slots
        # One that comes to an empty queue is tried: it delays nobody, and measures the engine.
        if wait_s > limit_s or (wait_s and whole_s > left_s):
            raise self._refusal(
                f"the request would wait {wait_s:.2g} s for its turn, of at most {limit_s:.2g} s, "
                f"and take {whole_s:.2g} s of the {left_s:.2g} s to its deadline; try again later, "
                "or send less at once"
            )

    def _refusal(self, message: str) -> QueueFullError:
        seconds = self._seconds(self.num_queued_tokens)
        return QueueFullError(message, retry_after_s=limit_retry_after_s(seconds))

    def _seconds(self, num_tokens: float) -> float:
        """Return the time to compute so many tokens; 0 before the first batch."""
        return num_tokens / self._tokens_per_s if self._tokens_per_s else 0.0


def limit_retry_after_s(seconds: float) -> float:
    """Limit the time that callers are told to wait to 1 to 60 seconds."""
    least, most = _RETRY_AFTER_S
    return min(most, max(least, seconds))


class RefusalPacer:
    """Delays refusals in excess of a rate, each by a bounded time.

    Many clients in a closed loop that ignore Retry-After send their next request at once. Then
    each iteration of the event loop refuses all of them again, and an admitted request, which
    takes several iterations, waits for all of these refusals in each. A delay bounds how often
    such a client can ask. A leaky bucket, as nginx's `limit_req`: few refusals have no delay.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s = 0.0

    async def wait(self) -> None:
        """Return when the next refusal may be sent."""
        delay_s = self.next_delay_s()
        if delay_s:
            await asyncio.sleep(delay_s)

    def next_delay_s(self) -> float:
        """Count a refusal, and return the seconds by which it is to be delayed."""
        now_s = self._clock()
        due_s = min(max(now_s, self._due_s), now_s + _MAX_REFUSAL_DELAY_S)
        self._due_s = due_s + 1 / _REFUSALS_PER_S
        if due_s == now_s:
            return 0.0
        # Random, so that clients that were refused together do not all come back together.
        due_s = now_s + (due_s - now_s) * random.uniform(0.75, 1)
        # Some at once, because to wake for each alone costs more than the refusal.
        return math.ceil(due_s / _REFUSAL_TICK_S) * _REFUSAL_TICK_S - now_s
