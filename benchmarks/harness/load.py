"""Load on a service: many connections of raw HTTP on one event loop, in a process of its own.

A client library takes more processor time for a request than the service does to refuse one, and
could not offer ten times of what the service can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from benchmarks.harness.plan import ClosedLoop, Passes, Plan
from benchmarks.harness.replies import NO_REPLY, LoadResult, Reply
from benchmarks.harness.service import HOST
from benchmarks.harness.subprocess_call import run_in_process, running_in_process

_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_RETRY_AFTER: Final = re.compile(rb"retry-after: *([^\r]*)", re.IGNORECASE)
_MAX_EXAMPLES: Final = 3


def loading(plan: Plan) -> AbstractContextManager[Callable[[], LoadResult]]:
    """Send in a process of its own while this process goes on; for `with`.

    Inside `with`, call the yielded function to wait for the result.
    """
    return running_in_process(send, plan)


def load(plan: Plan) -> LoadResult:
    """Send in a process of its own, and wait for the end."""
    return run_in_process(send, plan)


def send(plan: Plan) -> LoadResult:
    """Send in this process."""
    allow_open_files()
    return asyncio.run(_Sender(plan).run())


def allow_open_files() -> None:
    """Let this process have as many connections as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Answer(NamedTuple):
    status: int
    retry_after: str | None = None
    body: bytes = b""


class _Connection(asyncio.Protocol):
    """One request after another."""

    def __init__(self) -> None:
        self.is_open = False
        self._buffer = bytearray()
        self._answer: asyncio.Future[_Answer] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError(f"closed without a reply: {error}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        ends = self._buffer.find(b"\r\n\r\n")
        if ends < 0 or self._answer is None or self._answer.done():
            return
        head, body = bytes(self._buffer[:ends]), self._buffer[ends + 4 :]
        length = _LENGTH.search(head)
        if length is None:
            self._answer.set_exception(ValueError(f"a reply without a length: {head[:80]!r}"))
        elif len(body) >= int(length[1]):
            retry_after = _RETRY_AFTER.search(head)
            self._buffer.clear()
            self._answer.set_result(
                _Answer(int(head[9:12]), retry_after and retry_after[1].decode(), bytes(body))
            )

    async def ask(self, request: bytes) -> _Answer:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


class _Sender:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._result = LoadResult()
        self._idle: list[_Connection] = []
        self._slots = asyncio.Semaphore(plan.pattern.num_connections)
        self._stop = asyncio.Event()

    async def run(self) -> LoadResult:
        watching = asyncio.create_task(self._watch())
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        pattern, num_requests = self._plan.pattern, len(self._plan.requests)
        if isinstance(pattern, ClosedLoop | Passes):
            turns = pattern.turns(num_requests)
            await asyncio.gather(*(self._caller(turns) for _ in range(pattern.num_connections)))
        else:
            await self._by_the_clock(began_s + each for each in pattern.times_s(num_requests))
        self._result.seconds = time.monotonic() - began_s
        self._result.cpu_s = time.process_time() - began_cpu_s
        watching.cancel()
        for connection in self._idle:
            connection.close()
        return self._result

    async def _caller(self, turns: Iterator[int]) -> None:
        for index in turns:
            if self._stop.is_set():
                return
            await self._one(index, time.monotonic())

    async def _by_the_clock(self, times_s: Iterator[float]) -> None:
        running: set[asyncio.Task[None]] = set()
        for number, due_s in enumerate(times_s):
            # All due requests are sent together: a timer for each would cost more than the sending.
            if due_s > time.monotonic():
                await asyncio.sleep(due_s - time.monotonic())
            if self._stop.is_set():
                break
            task = asyncio.create_task(self._one(number % len(self._plan.requests), due_s))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def _one(self, index: int, due_s: float) -> None:
        request = self._plan.requests[index]
        async with self._slots:
            answer, problem = _Answer(NO_REPLY), ""
            try:
                async with asyncio.timeout(self._plan.timeout_s):
                    answer = await self._ask(request)
            except (OSError, ValueError) as error:  # TimeoutError is an OSError
                problem = f"{type(error).__name__}: {error}"
        self._result.replies.append(
            Reply(
                due_s=due_s,
                latency_s=time.monotonic() - due_s,
                status=answer.status,
                retry_after=answer.retry_after,
                problem=problem,
            )
        )
        self._keep(index, answer, problem)
        if answer.status == NO_REPLY:
            await asyncio.sleep(0.05)  # nor does a client come back at once

    def _keep(self, index: int, answer: _Answer, problem: str) -> None:
        """Keep one body of each request, and a few examples of failures."""
        if answer.status == 200:
            self._result.bodies.setdefault(index, answer.body)
        elif len(self._result.failures) < _MAX_EXAMPLES:
            path = self._plan.requests[index].split(b" ", 2)[1].decode()
            text = problem or f"{answer.status} {answer.body[:200].decode(errors='replace')}"
            self._result.failures.append(f"{path}: {text}")

    async def _ask(self, request: bytes) -> _Answer:
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
                status = (await self._ask(look)).status
            if status != 200:
                self._result.stopped_s = time.monotonic()
                self._stop.set()


def http_request(path: str, content: Any = None) -> bytes:
    """A whole request: POST of JSON where there is content, else GET."""
    if content is None:
        return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
    body = json.dumps(content).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
