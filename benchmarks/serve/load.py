"""A load generator, which sends raw HTTP over many connections from its own process.

A client library would use more of the CPU that the service is measured on.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.harness.process import run_in_process

HOST: Final = "127.0.0.1"
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """Requests to send. Each connection sends the next request when it has received a reply.

    Attributes:
        requests: complete HTTP requests, which are sent in this order in each pass.
        duration_s: seconds during which passes over the requests begin. Each pass is completed,
            so every run has the same mix of requests.
    """

    port: int
    requests: Sequence[bytes]
    num_connections: int
    duration_s: float = 0.0
    timeout_s: float = 600.0

    def turns(self) -> Iterator[int]:
        """Yield the index of the next request."""
        ends_s = time.monotonic() + self.duration_s
        while True:
            yield from range(len(self.requests))
            if time.monotonic() >= ends_s:
                return


@dataclass(kw_only=True, slots=True)
class LoadResult:
    """The replies to all requests.

    Attributes:
        latencies_s: latency of each reply with status 200, in seconds.
        failures: descriptions of errors, and of replies whose status is not 200.
        bodies: body of the first reply with status 200 to each request, by the request's index.
        seconds: time from the first request to the last reply.
    """

    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    bodies: dict[int, bytes] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        """Number of replies with status 200 per second."""
        return len(self.latencies_s) / self.seconds


def load(plan: LoadPlan) -> LoadResult:
    """Send the requests from another process, and return the results."""
    return run_in_process(_send, plan)


def post_request(path: str, content: Any) -> bytes:
    """Return a complete request with a JSON body."""
    body = json.dumps(content).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _send(plan: LoadPlan) -> LoadResult:
    async def send() -> None:
        turns = plan.turns()
        callers = (_call(plan, turns, result) for _ in range(plan.num_connections))
        await asyncio.gather(*callers)

    result, began_s = LoadResult(), time.monotonic()
    asyncio.run(send())
    result.seconds = time.monotonic() - began_s
    return result


async def _call(plan: LoadPlan, turns: Iterator[int], result: LoadResult) -> None:
    """Send requests over one connection, which is opened again after a failure."""
    reader, writer = await asyncio.open_connection(HOST, plan.port)
    for index in turns:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(plan.timeout_s):
                if writer.is_closing() or reader.at_eof():
                    reader, writer = await asyncio.open_connection(HOST, plan.port)
                writer.write(plan.requests[index])
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1]) if length else 0)
        # TimeoutError is an OSError, and a closed connection raises an EOFError.
        except (OSError, EOFError) as error:
            writer.close()
            result.failures.append(f"{type(error).__name__}: {error}")
            continue
        if (status := int(head[9:12])) == 200:
            result.latencies_s.append(time.monotonic() - began_s)
            result.bodies.setdefault(index, body)
        else:
            result.failures.append(f"{status} {body[:200].decode(errors='replace')}")
    writer.close()
