"""Clients that do not behave: silent, slow, gone, and very many."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final, TypeAlias

from benchmarks.harness.load import allow_open_files, http_request, load
from benchmarks.harness.plan import ClosedLoop, Plan
from benchmarks.harness.replies import LoadResult
from benchmarks.harness.service import HOST
from benchmarks.reliability.host import Service, mixed_requests, serving
from benchmarks.reliability.pressure import Setting, counted
from benchmarks.reliability.report import Result

_OTHERS: Final = 4
_PORTS_OF_AN_ADDRESS: Final = 5000
_SLOW: Final = 200
_STATUS_END: Final = 12
_UNREAD: Final = 4  # each is some work, and what they cost others is not that
_DEADLINE_S: Final = 5.0
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_REQUEST: Final = http_request("/fill-mask", {"inputs": "One [MASK] after another."})
_LARGE_REPLY: Final = http_request(
    "/fill-mask",
    {"inputs": ["One [MASK]."] * 32, "parameters": {"top_k": 100}},
)


# Ends when the service has answered or closed the connection; returns the answer.
_Client: TypeAlias = Callable[[socket.socket], Coroutine[Any, Any, list[int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stay:
    """Counts of the connections' ends.

    Attributes:
        num_open: number of connections that were made.
        ended_s: seconds until each was answered or closed, or ended by itself.
        statuses: of the answers.
    """

    num_open: int
    ended_s: list[float]
    statuses: list[int]


def connections(setting: Setting, num: int = 10_000) -> Result:
    """Idle connections, very many."""
    return _beside(setting, "connections", {"silent": (_silent, num)}, {})


def slow_clients(setting: Setting) -> Result:
    """Clients that send or read a byte a second."""
    kinds = {
        "slow headers": (_slow_headers, _SLOW),
        "slow body": (_slow_body, _SLOW),
        "reads nothing": (_reads_nothing, _UNREAD),
    }
    return _beside(setting, "slow-clients", kinds, {"DEADLINE_S": str(_DEADLINE_S)})


def half_open(setting: Setting) -> Result:
    """Peers that are gone in the middle of a request, with and without a word."""
    kinds = {"half a body, then silent": (_half_a_body, _SLOW), "reset": (_resets, _SLOW)}
    return _beside(setting, "half-open", kinds, {"DEADLINE_S": str(_DEADLINE_S)})


def _beside(
    setting: Setting,
    name: str,
    kinds: Mapping[str, tuple[_Client, int]],
    settings: Mapping[str, str],
) -> Result:
    """Measure ordinary requests before, during and after these clients."""
    stay_s = max(setting.seconds, 2.5 * _DEADLINE_S if settings else 0)
    stays: dict[str, Stay] = {}
    with serving(setting.bundle, setting.folder / name, settings) as service:
        _others(service, max(2.0, stay_s / 4))  # warm
        alone, alone_mb = _others(service, stay_s / 2), service.pss_mb
        with ProcessPoolExecutor(len(kinds), mp_context=get_context("spawn")) as pool:
            running = {
                kind: pool.submit(_crowd, client, number, service.port, stay_s)
                for kind, (client, number) in kinds.items()
            }
            time.sleep(stay_s / 4)  # until they are there
            busy, busy_mb = _others(service, stay_s / 2), service.pss_mb
            stays = {kind: future.result() for kind, future in running.items()}
        after = _others(service, stay_s / 4)
        after_mb = service.pss_mb
        is_ready = service.get("/readyz")[0] == 200
    total = sum(stay.num_open for stay in stays.values())
    return Result(
        name=name,
        figures={
            **{kind: _told(stay) for kind, stay in stays.items()},
            "replies to others": counted(busy),
            "p50 of others alone, beside, after, ms": ", ".join(
                f"{one.latency_ms(50):.0f}" for one in (alone, busy, after)
            ),
            "p99 of others alone, beside, after, ms": ", ".join(
                f"{one.latency_ms(99):.0f}" for one in (alone, busy, after)
            ),
            "memory alone, beside, after, MB": f"{alone_mb:.0f}, {busy_mb:.0f}, {after_mb:.0f}",
            "kB a connection": f"{(busy_mb - alone_mb) * 1000 / total:.1f}",
        },
        checks={
            "all connect": total == sum(number for _, number in kinds.values()),
            "others are all answered": busy.num_others + after.num_others == 0,
            "p50 of others under twice that alone": (
                busy.latency_ms(50) < 2 * alone.latency_ms(50)
            ),
            "it is ready afterwards": is_ready,
        },
    )


def _told(stay: Stay) -> str:
    text = f"{stay.num_open} connections"
    if stay.ended_s:
        last_s = max(stay.ended_s)
        text += f", {len(stay.ended_s)} ended, the last after {last_s:.1f} s"
    for status in sorted(set(stay.statuses)):
        text += f", {stay.statuses.count(status)} x {status}"
    if not stay.ended_s:
        text += ", none ended"
    return text


def _others(service: Service, seconds: float) -> LoadResult:
    return load(
        Plan(
            port=service.port,
            requests=mixed_requests(),
            pattern=ClosedLoop(num_connections=_OTHERS, duration_s=seconds),
        )
    )


def _crowd(client: _Client, num: int, port: int, stay_s: float) -> Stay:
    """Run clients at the same time, in this process."""
    allow_open_files()
    return asyncio.run(_gather(client, num, port, stay_s))


async def _gather(client: _Client, num: int, port: int, stay_s: float) -> Stay:
    opened, ended_s, statuses = [0], list[float](), list[int]()
    few = asyncio.Semaphore(200)  # connecting at once, for the listener's queue is not endless

    async def one(index: int) -> None:
        async with few:
            connection = await _connect(index, port)
        opened[0] += 1
        since_s = time.monotonic()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(stay_s):
                with contextlib.closing(connection):
                    statuses.extend(await client(connection))
                    ended_s.append(time.monotonic() - since_s)

    await asyncio.gather(*(one(index) for index in range(num)), return_exceptions=True)
    return Stay(num_open=opened[0], ended_s=ended_s, statuses=statuses)


async def _connect(index: int, port: int) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    # An address has too few ports for all of them.
    connection.bind((f"127.0.0.{2 + index // _PORTS_OF_AN_ADDRESS}", 0))
    await asyncio.get_running_loop().sock_connect(connection, (HOST, port))
    return connection


async def _silent(connection: socket.socket) -> list[int]:
    return await _dribble(connection, b"")


async def _slow_headers(connection: socket.socket) -> list[int]:
    return await _dribble(connection, _REQUEST[:40])


async def _slow_body(connection: socket.socket) -> list[int]:
    head = _REQUEST.index(b"\r\n\r\n") + 4
    await asyncio.get_running_loop().sock_sendall(connection, _REQUEST[:head])
    return await _dribble(connection, _REQUEST[head:-1])


async def _reads_nothing(connection: socket.socket) -> list[int]:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.get_running_loop().sock_sendall(connection, _LARGE_REPLY * 4)
    await asyncio.sleep(float("inf"))
    return []


async def _half_a_body(connection: socket.socket) -> list[int]:
    await asyncio.get_running_loop().sock_sendall(connection, _REQUEST[:-10])
    return await _dribble(connection, b"")


async def _resets(connection: socket.socket) -> list[int]:
    await asyncio.get_running_loop().sock_sendall(connection, _REQUEST[:-10])
    await asyncio.sleep(0.5)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    return []


async def _dribble(connection: socket.socket, content: bytes) -> list[int]:
    """Send a byte a second, then nothing, until the service answers or closes the connection."""
    loop, remaining, reply = asyncio.get_running_loop(), list(content), b""
    while True:
        if remaining:
            await loop.sock_sendall(connection, bytes([remaining.pop(0)]))
        try:
            async with asyncio.timeout(1.0 if remaining else None):
                part = await loop.sock_recv(connection, 4096)
        except TimeoutError:
            continue
        reply += part
        if not part or len(reply) >= _STATUS_END:
            return [int(reply[9:_STATUS_END])] if reply else []
