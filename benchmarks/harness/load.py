"""Load on a service: many connections of raw HTTP on one event loop, in a process of its own.

A client library takes more processor time for a request than the service does to refuse one, and
could not offer ten times of what the service can do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from benchmarks.harness.process import run_in_process, running_in_process
from benchmarks.harness.service import HOST

NO_REPLY: Final = 0  # in place of a status: the connection failed, or nothing came
_OPEN_CONNECTIONS: Final = 1000
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_RETRY_AFTER: Final = re.compile(rb"retry-after: *([^\r]*)", re.IGNORECASE)
_MAX_EXAMPLES: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedLoop:
    """Each connection sends its next request when it has its reply.

    Attributes:
        duration_s: requests are begun until so much time is over.
        in_passes: only whole passes over the requests are made, at least one, so that every run
            has the same mix.
    """

    num_connections: int
    duration_s: float = 0.0
    in_passes: bool = False

    def turns(self, num_requests: int) -> Iterator[int]:
        """Yield the index of the next request."""
        ends_s = time.monotonic() + self.duration_s
        for number in itertools.count():
            index = number % num_requests
            is_whole = number > 0 and index == 0
            if (is_whole or not self.in_passes) and time.monotonic() >= ends_s:
                return
            yield index


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLoop:
    """Requests are sent by the clock, whether or not replies come.

    Attributes:
        duration_s: they are sent at even distances for so long; None: one pass as if from many
            callers, at distances with an exponential distribution, the same at every run.
        num_connections: the most at a time.
    """

    rate_per_s: float
    duration_s: float | None = None
    num_connections: int = _OPEN_CONNECTIONS

    def times_s(self, num_requests: int) -> Iterator[float]:
        """Yield the time of each request, in seconds from the start."""
        if self.duration_s is None:
            draw = random.Random(0)
            return itertools.accumulate(
                draw.expovariate(self.rate_per_s) for _ in range(num_requests)
            )
        num_sent = int(self.rate_per_s * self.duration_s)
        return (number / self.rate_per_s for number in range(num_sent))


LoadPattern: TypeAlias = ClosedLoop | OpenLoop


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """The requests to send, and their times.

    Attributes:
        requests: whole requests as bytes; they are sent in turns.
        pattern: when they are sent.
        timeout_s: of a request.
    """

    port: int
    requests: Sequence[bytes]
    pattern: LoadPattern
    timeout_s: float = 70.0


class Reply(NamedTuple):
    """The reply to a request, or its failure.

    Attributes:
        due_s: when it was to be sent, on the clock of `time.monotonic`, which processes share.
        latency_s: from then to the end of the reply.
        status: of the reply, or NO_REPLY.
        retry_after: the header's text, if there is one.
        problem: the error, or the beginning of a body whose status is not 200.
    """

    due_s: float
    latency_s: float
    status: int
    retry_after: str | None = None
    problem: str = ""


@dataclass(kw_only=True, slots=True)
class LoadResult:
    """All replies.

    Attributes:
        bodies: of the first reply with status 200 to each request, by the request's index.
        seconds: from the first request to the last reply.
        cpu_s: that sending took.
    """

    replies: list[Reply] = field(default_factory=list)
    bodies: dict[int, bytes] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def statuses(self) -> dict[int, int]:
        """Number of replies by status."""
        return dict(sorted(Counter(reply.status for reply in self.replies).items()))

    def num(self, *statuses: int) -> int:
        """Return the number of replies with one of these statuses."""
        return sum(self.statuses.get(status, 0) for status in statuses)

    @property
    def per_s(self) -> float:
        """Replies of status 200 a second."""
        return self.num(200) / self.seconds

    @property
    def num_others(self) -> int:
        """Replies that are neither 200 nor 429, and requests that have none."""
        return len(self.replies) - self.num(200, 429)

    @property
    def num_bad_refusals(self) -> int:
        """429 without a Retry-After of whole seconds, 1 or more."""
        refusals = (reply.retry_after for reply in self.replies if reply.status == 429)
        return sum(not (text or "").isdecimal() or int(text or 0) < 1 for text in refusals)

    def latencies_s(self, status: int = 200) -> list[float]:
        """Return the latencies of the replies with this status."""
        return [reply.latency_s for reply in self.replies if reply.status == status]

    def latency_ms(self, percentile: float, status: int = 200) -> float:
        """Return a percentile of the latencies with this status; NaN if there are none."""
        latencies_s = self.latencies_s(status)
        return float(np.percentile(latencies_s, percentile)) * 1000 if latencies_s else float("nan")

    @property
    def failures(self) -> list[str]:
        """A few of the replies that are not 200, in words."""
        texts = (f"{reply.status} {reply.problem}" for reply in self.replies if reply.status != 200)
        return list(islice(dict.fromkeys(texts), _MAX_EXAMPLES))

    @property
    def counts(self) -> str:
        """Counts of replies by status, with the problems of failed ones, in words."""
        text = ", ".join(f"{num} x {status or 'none'}" for status, num in self.statuses.items())
        problems = Counter(each.problem for each in self.replies if each.status == NO_REPLY)
        return f"{text} {dict(problems)}" if problems else text


def loading(plan: LoadPlan) -> AbstractContextManager[Callable[[], LoadResult]]:
    """Send in a process of its own while this process goes on; for `with`.

    Inside `with`, call the yielded function to wait for the result.
    """
    return running_in_process(_send, plan)


def load(plan: LoadPlan) -> LoadResult:
    """Send in a process of its own, and wait for the end."""
    return run_in_process(_send, plan)


def allow_open_files() -> None:
    """Let this process have as many connections as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def http_request(path: str, content: Any = None) -> bytes:
    """Return a whole request: POST of JSON where there is content, else GET."""
    if content is None:
        return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
    body = json.dumps(content).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _send(plan: LoadPlan) -> LoadResult:
    allow_open_files()
    return asyncio.run(_Sender(plan).run())


_Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _ask(connection: _Connection, request: bytes) -> tuple[int, str | None, bytes]:
    """Return status, Retry-After and body."""
    reader, writer = connection
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length, retry_after = _LENGTH.search(head), _RETRY_AFTER.search(head)
    if length is None:
        raise ValueError(f"a reply without a length: {head[:80]!r}")
    body = await reader.readexactly(int(length[1]))
    return int(head[9:12]), retry_after and retry_after[1].decode(), body


class _Sender:
    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._result = LoadResult()
        self._idle: list[_Connection] = []
        self._slots = asyncio.Semaphore(plan.pattern.num_connections)

    async def run(self) -> LoadResult:
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        pattern, num_requests = self._plan.pattern, len(self._plan.requests)
        if isinstance(pattern, ClosedLoop):
            turns = pattern.turns(num_requests)
            await asyncio.gather(*(self._caller(turns) for _ in range(pattern.num_connections)))
        else:
            await self._by_the_clock(began_s + each for each in pattern.times_s(num_requests))
        self._result.seconds = time.monotonic() - began_s
        self._result.cpu_s = time.process_time() - began_cpu_s
        for _, writer in self._idle:
            writer.close()
        return self._result

    async def _caller(self, turns: Iterator[int]) -> None:
        for index in turns:
            await self._one(index, time.monotonic())

    async def _by_the_clock(self, times_s: Iterator[float]) -> None:
        running: set[asyncio.Task[None]] = set()
        for number, due_s in enumerate(times_s):
            # All due requests are sent together: a timer for each would cost more than the sending.
            if due_s > time.monotonic():
                await asyncio.sleep(due_s - time.monotonic())
            task = asyncio.create_task(self._one(number % len(self._plan.requests), due_s))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def _one(self, index: int, due_s: float) -> None:
        status, retry_after, body, problem = NO_REPLY, None, b"", ""
        async with self._slots:
            try:
                async with asyncio.timeout(self._plan.timeout_s):
                    answer = await self._exchange(self._plan.requests[index])
                    status, retry_after, body = answer
            # TimeoutError is an OSError, the end of a connection an EOFError.
            except (OSError, ValueError, EOFError) as error:
                problem = f"{type(error).__name__}: {error}"
        latency_s = time.monotonic() - due_s
        if status == 200:
            self._result.bodies.setdefault(index, body)
        else:
            problem = problem or body[:200].decode(errors="replace")
        self._result.replies.append(Reply(due_s, latency_s, status, retry_after, problem))
        if status == NO_REPLY:
            await asyncio.sleep(0.05)  # nor does a client come back at once

    async def _exchange(self, request: bytes) -> tuple[int, str | None, bytes]:
        while self._idle:
            connection = self._idle.pop()
            if not connection[0].at_eof():  # else the service has closed it
                break
        else:
            connection = await asyncio.open_connection(HOST, self._plan.port)
        try:
            answer = await _ask(connection, request)
        except BaseException:
            connection[1].close()
            raise
        self._idle.append(connection)
        return answer
