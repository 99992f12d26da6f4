"""Very many clients at once, and clients that do not send what they began: others are answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.albert_serve.support import Running

NUM_CLIENTS = 512
NUM_UNFINISHED = 200
BODY = b'{"inputs": "The run was scored in the first inning."}'
HEAD = (
    b"POST /text-classification HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


async def connect(running: Running, stack: AsyncExitStack) -> tuple[asyncio.StreamReader, Any]:
    url = httpx.URL(running.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    stack.callback(writer.close)
    return reader, writer


async def ask(running: Running) -> tuple[int, bool]:
    """The status of one request over a connection of its own, and whether it says when to retry."""
    async with AsyncExitStack() as stack:
        reader, writer = await connect(running, stack)
        writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
        reply = await reader.read()
        return int(reply.split()[1]), b"retry-after: " in reply.lower()


def test_512_clients_at_once_get_200_or_429(service: Running) -> None:
    async def ask_all() -> list[tuple[int, bool]]:
        return await asyncio.gather(*(ask(service) for _ in range(NUM_CLIENTS)))

    counted = Counter(asyncio.run(ask_all()))
    assert counted.keys() <= {(200, False), (429, True)}
    assert counted[200, False] > 0


@pytest.mark.parametrize(
    "start",
    [b"POST /text-classification HT", HEAD + b"Content-Length: 60000\r\n\r\n" + BODY],
    ids=["heads", "bodies"],
)
def test_unfinished_requests_keep_nobody_waiting(start: bytes, service: Running) -> None:
    async def ask_beside() -> list[tuple[int, bool]]:
        async with AsyncExitStack() as stack:
            for _ in range(NUM_UNFINISHED):
                _, writer = await connect(service, stack)
                writer.write(start)
            return [await ask(service) for _ in range(20)]

    assert set(asyncio.run(ask_beside())) == {(200, False)}
