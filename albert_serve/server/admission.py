"""Admission control: requests over a concurrency limit get 429 before their body is parsed.

Reading, validating and tokenising a request costs far more than refusing it here, and a parsed
request waits for the CPU even while the engine's queue is short. So the bound of the queue is not
enough: at ten times its capacity a service would do little but parse.

The limit is adaptive, of the family of AIMD and gradient limits (TCP Vegas; Netflix's
concurrency-limits). These probe for it: they raise it until losses or latencies grow. Here the
throughput is measured, and Little's law gives the limit of a wanted latency at once, with no phase
of overload to learn from.

A request is refused in four places, in this order; each knows what the one before it could not:

1. here, by the number of requests in progress (429), before its body is read;
2. `Batcher._check_room`, by its tokens and those in the queue (429), once they are counted;
3. `Batcher._check_wait`, by the expected wait for the engine at its usual throughput (429);
4. `Scheduler.is_late`, if it would miss its deadline even at the best throughput (504), on
   entering the queue and again whenever a batch is chosen.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.batching.scheduler import PRIORITIES, Priority
from albert_serve.batching.throughput import limit_retry_after_s
from albert_serve.errors import QueueFullError
from albert_serve.server.auth import PRIORITY_HEADER
from albert_serve.server.error_replies import error_response, find_or_make_id
from albert_serve.server.paths import Target, target_of

_BUSY_REQUESTS: Final = 16  # enough concurrent requests to saturate the service
_IDLE_REQUESTS: Final = 4  # below this the throughput is bounded by arrivals
# The floor of the limit: 64 callers in a closed loop are admitted, however slow the model.
_MIN_LIMIT: Final = 72
# The floor under overload, when more requests are refused than answered.
_MIN_LIMIT_OVERLOADED: Final = 32
_INITIAL_LIMIT: Final = 256  # until the throughput has been measured
_WINDOW_S: Final = 1.0  # many iterations of the event loop, which answers in bursts
_SMOOTHING: Final = 0.3
_LOG_INTERVAL_S: Final = 10.0
_REFUSAL: Final = "albert_serve.refusal"
_PRIORITY: Final = "albert_serve.priority"
_logger = logging.getLogger(__name__)


class ConcurrencyLimiter:
    """A concurrency limit that keeps the expected latency within a bound.

    By Little's law the latency of a new request is the number of concurrent requests divided by
    the throughput. The throughput is measured while enough requests are in progress to saturate
    the service, whatever its bottleneck. Refused and invalid requests cost less than answers, so a
    window with more of these than of answers is not used.

    Args:
        max_latency_s: the bound.
        clock: in seconds.
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
        """Whether the limit is reached."""
        return self.num_requests >= self.limit

    def admit(self) -> None:
        """Count a request as in progress."""
        self.num_requests += 1
        if self._window_start_s is None and self.num_requests >= _BUSY_REQUESTS:
            self._start_window()

    def count_refusal(self) -> None:
        """Count a refused request."""
        self._num_refused += 1

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


def priority_of(scope: Scope) -> Priority | None:
    """Return the priority of a request, which is read at the first call; None if there is none."""
    if _PRIORITY not in scope:
        text = Headers(scope=scope).get(PRIORITY_HEADER, PRIORITIES[0]).strip().lower()
        scope[_PRIORITY] = next((name for name in PRIORITIES if name == text), None)
    priority: Priority | None = scope[_PRIORITY]
    return priority


class TaskDirectory(Protocol):
    """The models and tasks that requests may name."""

    def find_task(self, target: Target) -> tuple[str, str] | None:
        """Return the names of a target's model and task; None if it is no task that there is."""
        ...

    def count_refusal(self, model: str, task: str) -> None:
        """Count a refused request."""
        ...


class AdmissionController:
    """Outermost ASGI middleware: answers 429 at once over the concurrency limit.

    Each model has a limit for interactive requests and one for batch jobs. A request counts from
    the end of its body to the start of its reply, so slow clients do not use up the limit.

    Args:
        directory: returns the tasks that are limited; None while the service starts.
        max_latency_s: the bound on the expected latency of interactive requests.
        max_batch_latency_s: the same for batch jobs.
        around_refusals: middleware that is applied to refusals only.
    """

    def __init__(
        self,
        app: ASGIApp,
        directory: Callable[[], TaskDirectory | None],
        max_latency_s: float,
        max_batch_latency_s: float,
        around_refusals: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        self.app = app
        self._refuse = around_refusals(_refuse)
        self._directory = directory
        self._max_latencies_s: dict[bool, float] = {False: max_latency_s, True: max_batch_latency_s}
        self._limiters: dict[tuple[str, bool], ConcurrencyLimiter] = {}
        self._num_refused = 0
        self._logged_s = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        directory = self._directory()
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        names = directory.find_task(target_of(scope)) if directory and is_post else None
        if directory is None or names is None:
            await self.app(scope, receive, send)
            return
        model, task = names
        limiter = self._limiter(model, priority_of(scope) == "batch")
        if not limiter.is_full():
            await self._pass(limiter, scope, receive, send)
            return
        limiter.count_refusal()
        directory.count_refusal(model, task)
        self._log_refusal(model)
        scope["albert_serve.request_id"] = find_or_make_id(Headers(scope=scope))
        scope[_REFUSAL] = _overloaded(limiter)
        await self._refuse(scope, receive, send)

    def _limiter(self, model: str, is_batch: bool) -> ConcurrencyLimiter:
        limiter = self._limiters.get((model, is_batch))
        if limiter is None:
            limiter = self._limiters[model, is_batch] = ConcurrencyLimiter(
                self._max_latencies_s[is_batch]
            )
        return limiter

    def _log_refusal(self, model: str) -> None:
        """Log refusals at most every 10 s: under overload a line for each costs too much."""
        self._num_refused += 1
        if time.monotonic() - self._logged_s < _LOG_INTERVAL_S:
            return
        _logger.warning("%d requests refused, the last to model %s", self._num_refused, model)
        self._num_refused, self._logged_s = 0, time.monotonic()

    async def _pass(
        self, limiter: ConcurrencyLimiter, scope: Scope, receive: Receive, send: Send
    ) -> None:
        is_admitted = is_released = False

        async def read() -> Message:
            nonlocal is_admitted
            message = await receive()
            if not is_admitted and not is_released and not message.get("more_body"):
                is_admitted = True
                limiter.admit()
            return message

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                release(message["status"])
            await send(message)

        def release(status: int | None) -> None:
            nonlocal is_released
            if is_admitted and not is_released:
                limiter.release(status)
            is_released = True

        try:
            await self.app(scope, read, reply)
        finally:
            release(None)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(scope[_REFUSAL], scope)(scope, receive, send)


def _overloaded(limiter: ConcurrencyLimiter) -> QueueFullError:
    latency_s = limiter.expected_latency_s
    return QueueFullError(
        f"{limiter.num_requests} requests are being answered, which takes {latency_s:.2g} s; "
        f"{limiter.limit} are taken at once; try again later",
        retry_after_s=limit_retry_after_s(latency_s),
    )
