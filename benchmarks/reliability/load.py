"""Load, from a process of its own: many connections of raw HTTP on one event loop.

A client library takes more processor time for a request than the service does to refuse one, and
could not offer ten times of what the service can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Final

import numpy as np

HOST: Final = "127.0.0.1"
NO_REPLY: Final = 0  # in place of a status: the connection failed, or nothing came
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_RETRY_AFTER: Final = re.compile(rb"retry-after: *([^\r]*)", re.IGNORECASE)
_GIVE_UP_S: Final = 70.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is sent.

    Attributes:
        requests: whole requests as bytes; they are sent in turns.
        num_connections: of a closed loop, in which each sends when it has its reply; of an open
            loop the most that there are.
        rate_per_s: of an open loop, which sends by the clock; None for a closed one.
        watch_s: look at /readyz so often, as a load balancer does, and send nothing new once it is
            not 200; None: do not look.
    """

    port: int
    requests: Sequence[bytes]
    duration_s: float
    num_connections: int
    rate_per_s: float | None = None
    watch_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What came of a request.

    Attributes:
        due_s: when it was to be sent, on the clock of `time.monotonic`, which processes share.
        latency_s: from then to the end of the reply.
        status: of the reply, or NO_REPLY.
        retry_after: the header's text, if there is one.
        problem: what went wrong where there is no reply.
    """

    due_s: float
    latency_s: float
    status: int
    retry_after: str | None = None
    problem: str = ""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """All replies.

    Attributes:
        stopped_s: when /readyz was seen not to be 200, if it was.
    """

    replies: list[Reply] = field(default_factory=list)
    stopped_s: float | None = None

    @property
    def statuses(self) -> dict[int, int]:
        """How many replies there are of each status."""
        return dict(sorted(Counter(reply.status for reply in self.replies).items()))

    def num(self, *statuses: int) -> int:
        """How many replies have one of these statuses."""
        return sum(self.statuses.get(status, 0) for status in statuses)

    @property
    def num_others(self) -> int:
        """Replies that are neither 200 nor 429, and requests that have none."""
        return len(self.replies) - self.num(200, 429)

    @property
    def num_bad_refusals(self) -> int:
        """429 without a Retry-After of whole seconds, 1 or more."""
        refusals = (reply.retry_after for reply in self.replies if reply.status == 429)
        return sum(not (text or "").isdecimal() or int(text or 0) < 1 for text in refusals)

    def latency_ms(self, percentile: float, status: int = 200) -> float:
        """Of the replies with this status; not a number where there are none."""
        found = [reply.latency_s for reply in self.replies if reply.status == status]
        return float(np.percentile(found, percentile)) * 1000 if found else float("nan")

    @property
    def problems(self) -> dict[str, int]:
        """What went wrong with the others, and how often."""
        others = (reply for reply in self.replies if reply.status not in (200, 429))
        return dict(Counter(reply.problem or str(reply.status) for reply in others))


@contextlib.contextmanager
def loading(plan: Plan) -> Iterator[Future[Outcome]]:
    """Send in a process of its own, while this one does what it is to be tested against."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(int).result()  # it has started, imports and all
        yield pool.submit(send, plan)


def load(plan: Plan) -> Outcome:
    """Send in a process of its own, and wait for the end."""
    with loading(plan) as future:
        return future.result()


def send(plan: Plan) -> Outcome:
    """Send in this process."""
    allow_open_files()
    return asyncio.run(_Sender(plan).run())


def allow_open_files() -> None:
    """Let this process have as many connections as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Connection(asyncio.Protocol):
    """One request after another."""

    def __init__(self) -> None:
        self.is_open = False
        self._buffer = bytearray()
        self._reply: asyncio.Future[tuple[int, str | None]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConnectionResetError(f"closed without a reply: {error}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        ends = self._buffer.find(b"\r\n\r\n")
        if ends < 0 or self._reply is None or self._reply.done():
            return
        head = bytes(self._buffer[:ends])
        length = _LENGTH.search(head)
        if length is None:
            self._reply.set_exception(ValueError(f"a reply without a length: {head[:80]!r}"))
        elif len(self._buffer) >= ends + 4 + int(length[1]):
            retry_after = _RETRY_AFTER.search(head)
            self._buffer.clear()
            self._reply.set_result((int(head[9:12]), retry_after and retry_after[1].decode()))

    async def ask(self, request: bytes) -> tuple[int, str | None]:
        assert self._transport is not None
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._reply

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


class _Sender:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._outcome = Outcome()
        self._requests = itertools.cycle(plan.requests)
        self._idle: list[_Connection] = []
        self._slots = asyncio.Semaphore(plan.num_connections)
        self._stop = asyncio.Event()

    async def run(self) -> Outcome:
        watching = asyncio.create_task(self._watch())
        ends_s = time.monotonic() + self._plan.duration_s
        if self._plan.rate_per_s is None:
            await asyncio.gather(*(self._loop(ends_s) for _ in range(self._plan.num_connections)))
        else:
            await self._by_the_clock(self._plan.rate_per_s, ends_s)
        watching.cancel()
        for connection in self._idle:
            connection.close()
        return self._outcome

    async def _loop(self, ends_s: float) -> None:
        while (now_s := time.monotonic()) < ends_s and not self._stop.is_set():
            await self._one(now_s)

    async def _by_the_clock(self, rate_per_s: float, ends_s: float) -> None:
        running: set[asyncio.Task[None]] = set()
        due_s = time.monotonic()
        while due_s < ends_s and not self._stop.is_set():
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            # All that is due: a timer for each would cost more than the sending.
            while due_s <= min(time.monotonic(), ends_s):
                task = asyncio.create_task(self._one(due_s))
                running.add(task)
                task.add_done_callback(running.discard)
                due_s += 1 / rate_per_s
        await asyncio.gather(*running)

    async def _one(self, due_s: float) -> None:
        async with self._slots:
            status, retry_after, problem = NO_REPLY, None, ""
            try:
                async with asyncio.timeout(_GIVE_UP_S):
                    status, retry_after = await self._ask(next(self._requests))
            except (OSError, ValueError) as error:  # TimeoutError is an OSError
                problem = f"{type(error).__name__}: {error}"
        self._outcome.replies.append(
            Reply(
                due_s=due_s,
                latency_s=time.monotonic() - due_s,
                status=status,
                retry_after=retry_after,
                problem=problem,
            )
        )
        if status == NO_REPLY:
            await asyncio.sleep(0.05)  # nor does a client come back at once

    async def _ask(self, request: bytes) -> tuple[int, str | None]:
        connection = await self._connection()
        try:
            answer = await connection.ask(request)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, HOST, self._plan.port)
        return made

    async def _watch(self) -> None:
        if self._plan.watch_s is None:
            return
        look = http_request("/readyz")
        while not self._stop.is_set():
            await asyncio.sleep(self._plan.watch_s)
            status = NO_REPLY
            with contextlib.suppress(OSError, ValueError):
                status, _ = await self._ask(look)
            if status != 200:
                self._outcome.stopped_s = time.monotonic()
                self._stop.set()


def http_request(path: str, body: bytes | None = None) -> bytes:
    """A whole request: POST of JSON where there is a body, else GET."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
