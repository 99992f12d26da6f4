"""A process that sends requests to a service and times the replies.

The parent writes a `Load` to its standard input and reads a `Measured` from its standard output.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import aiohttp

from benchmarks.engines.jobs import BenchmarkError

_TIMEOUT_S: Final = 600
_MAX_TOLD: Final = 3
_SEED: Final = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is sent.

    Attributes:
        calls: path and body of each request of a pass.
        num_connections: requests in flight, each followed by the next; with a rate, only a limit.
        least_s: passes are begun until so much time is over.
        rate_per_s: of requests that come at random, as if from many callers; None sends the next
            when a reply is there.
    """

    url: str
    calls: Sequence[tuple[str, dict[str, Any]]]
    num_connections: int
    least_s: float = 0.0
    rate_per_s: float | None = None


@dataclass(kw_only=True, slots=True)
class Measured:
    """What came back.

    Attributes:
        latencies_s: of the replies with status 200.
        failures: of the other requests, what was wrong; only a few are told.
        replies: to the first pass, in order; None where one failed.
        cpu_s: that this process took.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    num_failed: int = 0
    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    replies: list[Any] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        """Requests answered a second."""
        return len(self.latencies_s) / self.seconds

    def fail(self, what: str) -> None:
        """Count a request that failed."""
        self.num_failed += 1
        if len(self.failures) < _MAX_TOLD:
            self.failures.append(what)


def send(load: Load) -> Measured:
    """Do it in a process of its own, so that what it takes disturbs no caller.

    Raises:
        BenchmarkError: the process failed; a request that fails is counted instead.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving.load"],
        input=json.dumps(asdict(load)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"the load could not be sent: {done.stderr.strip()[-400:]}")
    return Measured(**json.loads(done.stdout))


async def _send(load: Load) -> Measured:
    measured = Measured(replies=[None] * len(load.calls))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began, began_cpu = time.perf_counter(), time.process_time()
        if load.rate_per_s is None:
            indices = _passes(load, began)
            await asyncio.gather(
                *(_caller(session, load, indices, measured) for _ in range(load.num_connections))
            )
        else:
            await _arrivals(session, load, load.rate_per_s, measured)
        measured.seconds = time.perf_counter() - began
        measured.cpu_s = time.process_time() - began_cpu
    return measured


def _passes(load: Load, began: float) -> Iterator[int]:
    """Which request is next; whole passes, so that every run has the same mix."""
    while True:
        yield from range(len(load.calls))
        if time.perf_counter() - began >= load.least_s:
            return


async def _caller(
    session: aiohttp.ClientSession, load: Load, indices: Iterator[int], measured: Measured
) -> None:
    for index in indices:
        await _ask(session, load, index, measured, time.perf_counter())


async def _arrivals(
    session: aiohttp.ClientSession, load: Load, rate_per_s: float, measured: Measured
) -> None:
    """Requests whose distances in time have an exponential distribution, the same at every run."""
    draw = random.Random(_SEED)
    due, tasks = time.perf_counter(), []
    for index in range(len(load.calls)):
        due += draw.expovariate(rate_per_s)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(_ask(session, load, index, measured, due)))
    await asyncio.gather(*tasks)


async def _ask(
    session: aiohttp.ClientSession, load: Load, index: int, measured: Measured, began: float
) -> None:
    path, body = load.calls[index]
    try:
        async with session.post(load.url + path, json=body) as reply:
            content = await reply.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        measured.fail(f"{path}: {error!r}")
        return
    if reply.status != 200:
        measured.fail(f"{path}: {reply.status} {content[:200].decode(errors='replace')}")
        return
    measured.latencies_s.append(time.perf_counter() - began)
    if measured.replies[index] is None:
        measured.replies[index] = json.loads(content)


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(_send(Load(**json.load(sys.stdin)))))))
