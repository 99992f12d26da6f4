"""Load on a service: many connections of raw HTTP on one event loop, in a process of its own.

A client library would take a part of the processor that the service is measured on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from benchmarks.harness.process import run_in_process
from benchmarks.harness.service import HOST

_NO_REPLY: Final = 0  # in place of a status: the connection failed, or nothing came
_OPEN_CONNECTIONS: Final = 1000
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedLoop:
    """Each connection sends its next request when it has its reply.

    Attributes:
        duration_s: whole passes over the requests are begun until so much time is over, at least
            one, so that every run has the same mix.
    """

    num_connections: int
    duration_s: float = 0.0

    def turns(self, num_requests: int) -> Iterator[int]:
        """Yield the index of the next request."""
        ends_s = time.monotonic() + self.duration_s
        for number in itertools.count():
            index = number % num_requests
            if number > 0 and index == 0 and time.monotonic() >= ends_s:
                return
            yield index


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLoop:
    """One pass over the requests by the clock, whether or not replies come.

    The distances are those of many callers, with an exponential distribution, the same at every
    run.
    """

    rate_per_s: float
    num_connections: int = _OPEN_CONNECTIONS

    def times_s(self, num_requests: int) -> Iterator[float]:
        """Yield the time of each request, in seconds from the start."""
        draw = random.Random(0)
        return itertools.accumulate(draw.expovariate(self.rate_per_s) for _ in range(num_requests))


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


class LoadReply(NamedTuple):
    """The reply to a request, or its failure.

    Attributes:
        latency_s: from when it was to be sent to the end of the reply.
        status: of the reply; 0 where none came.
        problem: the error, or the beginning of a body whose status is not 200.
    """

    latency_s: float
    status: int
    problem: str = ""


@dataclass(kw_only=True, slots=True)
class LoadResult:
    """All replies.

    Attributes:
        bodies: of the first reply with status 200 to each request, by the request's index.
        seconds: from the first request to the last reply.
        cpu_s: that sending took.
    """

    replies: list[LoadReply] = field(default_factory=list)
    bodies: dict[int, bytes] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def latencies_s(self) -> list[float]:
        """The latencies of the replies with status 200."""
        return [reply.latency_s for reply in self.replies if reply.status == 200]

    @property
    def per_s(self) -> float:
        """Replies of status 200 a second."""
        return len(self.latencies_s) / self.seconds

    @property
    def failures(self) -> list[str]:
        """The replies that are not 200, in words."""
        return [f"{each.status} {each.problem}" for each in self.replies if each.status != 200]


def load(plan: LoadPlan) -> LoadResult:
    """Send in a process of its own, and wait for the end."""
    return run_in_process(_send, plan)


def post_request(path: str, content: Any) -> bytes:
    """Return a whole request with a body of JSON."""
    body = json.dumps(content).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _send(plan: LoadPlan) -> LoadResult:
    return asyncio.run(_Sender(plan).run())


_Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _ask(connection: _Connection, request: bytes) -> tuple[int, bytes]:
    """Return status and body."""
    reader, writer = connection
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    if length is None:
        raise ValueError(f"a reply without a length: {head[:80]!r}")
    return int(head[9:12]), await reader.readexactly(int(length[1]))


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
            times_s = enumerate(pattern.times_s(num_requests))
            await asyncio.gather(*(self._at(began_s + due_s, index) for index, due_s in times_s))
        self._result.seconds = time.monotonic() - began_s
        self._result.cpu_s = time.process_time() - began_cpu_s
        for _, writer in self._idle:
            writer.close()
        return self._result

    async def _caller(self, turns: Iterator[int]) -> None:
        for index in turns:
            await self._one(index, time.monotonic())

    async def _at(self, due_s: float, index: int) -> None:
        await asyncio.sleep(due_s - time.monotonic())
        await self._one(index, due_s)

    async def _one(self, index: int, due_s: float) -> None:
        status, body, problem = _NO_REPLY, b"", ""
        async with self._slots:
            try:
                async with asyncio.timeout(self._plan.timeout_s):
                    status, body = await self._exchange(self._plan.requests[index])
            # TimeoutError is an OSError, the end of a connection an EOFError.
            except (OSError, ValueError, EOFError) as error:
                problem = f"{type(error).__name__}: {error}"
        latency_s = time.monotonic() - due_s
        if status == 200:
            self._result.bodies.setdefault(index, body)
        else:
            problem = problem or body[:200].decode(errors="replace")
        self._result.replies.append(LoadReply(latency_s, status, problem))

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
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
