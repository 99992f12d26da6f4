"""The limits of a service: concurrent requests, size of bodies, queued tokens, items, time.

A request has one `Admission` from its arrival to its reply. Every rejection because of load (429)
is raised and counted here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, TypeVar, TypeVarTuple, Unpack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.batching.queue import BatchObserver
from albert_serve.errors import DeadlineExceededError, QueueFullError, TooMuchAtOnceError
from albert_serve.server.errors import error_response
from albert_serve.server.logging import RepeatedWarning
from albert_serve.server.paths import RequestTarget, target_of
from albert_serve.settings import Settings

# Reading a body of this size takes about 2 ms. Passing it to a thread would take longer.
SMALL_BYTES: Final = 1 << 12
_ADMISSION: Final = "albert_serve.admission"
_Args = TypeVarTuple("_Args")
_ResultT = TypeVar("_ResultT")
_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class LargeRequests:
    """The memory and the thread that the large requests of a process share.

    One thread serves all large requests. Python runs one thread at a time, so more threads would
    only delay other requests. The thread belongs to an executor, because `anyio.to_thread` would
    begin the next call while an abandoned call runs, and would keep frames of rejected requests.

    Attributes:
        max_bytes: maximum size of all bodies together. A single body may exceed it.
        num_bytes: size of the bodies of unanswered requests.
    """

    max_bytes: int
    num_bytes: int = 0
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="large-requests")
    )


class Limits:
    """The limits and the current usage of a model, for one event loop.

    Args:
        name: name of the model, for the log.
        observer: receiver of rejected and expired requests.

    Attributes:
        num_requests: number of requests with a slot, which `max_concurrency` limits.
        num_open: number of requests in progress, including those without a slot.
        unused: event that is set while no request is in progress.
    """

    def __init__(
        self, name: str, settings: Settings, large: LargeRequests, observer: BatchObserver
    ) -> None:
        self.name = name
        self.settings = settings
        self.large = large
        self.observer = observer
        self.num_requests = 0
        self.num_open = 0
        self.unused = asyncio.Event()
        self.unused.set()

    def admit(self, task: str) -> Admission:
        """Return the admission of a new request, which takes a slot."""
        limit = self.settings.max_concurrency
        if self.num_requests >= limit:
            self.observer.shed(task)
            raise QueueFullError(
                f"{self.num_requests} requests are in progress; the limit is {limit}. "
                "Try again later."
            )
        admission = Admission(self, task)
        admission.take_slot()
        return admission

    def check_tokens(self, num_tokens: int, num_queued: int) -> None:
        """Reject a request whose tokens do not fit in the queue. The caller holds its lock."""
        num_free = self.settings.max_queue_tokens - num_queued
        if num_tokens > num_free:
            raise QueueFullError(
                f"{num_tokens} tokens do not fit in the queue, which has room for {num_free} more "
                "tokens. Try again later."
            )

    def check_num_items(self, inputs: object, name: str = "inputs") -> None:
        """Reject a list of too many inputs before they are validated."""
        if isinstance(inputs, list) and len(inputs) > self.settings.max_items:
            raise TooMuchAtOnceError(
                f"{name} has {len(inputs)} items; the limit is {self.settings.max_items}. Split "
                "the list."
            )


class Admission:
    """A request's share of its model's limits. Inside `with`, the request is in progress.

    Attributes:
        limits: limits of the request's model.
        num_bytes: number of bytes of the body that have arrived.
        ends_s: deadline on the clock of `time.monotonic`.
    """

    def __init__(self, limits: Limits, task: str) -> None:
        self.limits = limits
        self.num_bytes = 0
        self.ends_s = time.monotonic() + limits.settings.deadline_s
        self._task = task
        self._num_slots = 0
        self._num_large_bytes = 0

    def __enter__(self) -> Self:
        self.limits.num_open += 1
        self.limits.unused.clear()
        return self

    def __exit__(
        self, _kind: object, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if isinstance(error, QueueFullError):
            self.limits.observer.shed(self._task)
        elif isinstance(error, DeadlineExceededError):
            self.limits.observer.expired(self._task)
        self.limits.large.num_bytes -= self._num_large_bytes
        self.limits.num_open -= 1
        if not self.limits.num_open:
            self.limits.unused.set()

    @property
    def left_s(self) -> float:
        """The number of seconds until the deadline."""
        return self.ends_s - time.monotonic()

    def take_slot(self) -> None:
        """Take a slot for this request."""
        self._num_slots = 1
        self.limits.num_requests += 1

    def free_slot(self) -> None:
        """Free the slot, if the request has one."""
        self.limits.num_requests -= self._num_slots
        self._num_slots = 0

    @contextmanager
    def without_slot(self) -> Iterator[None]:
        """Free the slot while the request waits for its client."""
        had_slot = self._num_slots
        self.free_slot()
        yield
        if had_slot:
            self.take_slot()

    def count_bytes(self, num_bytes: int) -> None:
        """Record how many bytes of the body have arrived.

        All large bodies have a common limit, because clients may leave bodies unfinished.
        """
        self.num_bytes = num_bytes
        if num_bytes <= SMALL_BYTES:
            return
        large = self.limits.large
        num_other_bytes = large.num_bytes - self._num_large_bytes
        if num_other_bytes and num_other_bytes + num_bytes > large.max_bytes:
            raise QueueFullError(
                f"The bodies of other requests in progress have {num_other_bytes} bytes; with this "
                f"body they exceed the limit of {large.max_bytes} bytes. Try again later."
            )
        large.num_bytes += num_bytes - self._num_large_bytes
        self._num_large_bytes = num_bytes

    async def call(self, function: Callable[[Unpack[_Args]], _ResultT], *args: *_Args) -> _ResultT:
        """Call a function, in the thread of large requests unless the body is small.

        If the request is cancelled or expires first, the call never begins. If it expires during
        the call, the result is discarded.
        """
        if self.num_bytes <= SMALL_BYTES:
            return function(*args)
        return await self.in_time(
            asyncio.get_running_loop().run_in_executor(
                self.limits.large.thread, copy_context().run, function, *args
            ),
            "The answer missed the deadline. Send fewer inputs per request.",
        )

    async def in_time(self, work: asyncio.Future[_ResultT], message: str) -> _ResultT:
        """Return the result of `work`, which is cancelled at the deadline or with the caller.

        `asyncio.timeout` is not used, because its exceptions refer to each other. They would keep
        the body of each expired request in memory until a garbage collection.

        Args:
            message: message of the error if the deadline passes.
        """
        try:
            await asyncio.wait({work}, timeout=max(0.0, self.left_s))
            if work.done():
                return work.result()
            raise DeadlineExceededError(message)
        finally:
            work.cancel()
            # The exception's traceback refers to this frame, and `work` to the exception: a cycle.
            del work


class AdmissionControl:
    """ASGI middleware that admits requests of tasks, or answers 429 above a model's concurrency.

    A request has a slot except while its body arrives, so that slow clients do not exhaust the
    limit. A request also has a slot before the application begins to read. Otherwise requests that
    arrive together could exceed the limit.

    Args:
        find: function that returns the limits and the task of a target, or None for other targets.
    """

    def __init__(
        self, app: ASGIApp, *, find: Callable[[RequestTarget], tuple[Limits, str] | None]
    ) -> None:
        self.app = app
        self._find = find
        self._rejections = RepeatedWarning(_logger, "%d requests were rejected, the last to %s.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it before its body is read."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        target_limits = self._find(target_of(scope)) if is_post else None
        if target_limits is None:
            await self.app(scope, receive, send)
            return
        limits, task = target_limits
        try:
            admission = limits.admit(task)
        except QueueFullError as error:
            self._rejections.log(limits.name)
            await error_response(error, scope)(scope, receive, send)
            return

        async def send_without_slot(message: Message) -> None:
            admission.free_slot()
            await send(message)

        scope[_ADMISSION] = admission
        try:
            await self.app(scope, receive, send_without_slot)
        finally:
            admission.free_slot()


def admission_of(scope: Scope, limits: Limits, task: str) -> Admission:
    """Return the admission of a request, or a new one without a slot if nothing admitted it."""
    admission: Admission = scope.get(_ADMISSION) or Admission(limits, task)
    return admission
