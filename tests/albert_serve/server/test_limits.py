"""Requests over the concurrency limit are refused unread; slow clients do not use it up."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.server.limits import AdmissionControl, Limits
from albert_serve.server.paths import RequestTarget
from tests.albert_serve.batching.engines import Diary, make_limits, on_event_loop
from tests.albert_serve.support import Running

LIMIT = 8


def scope(path: str = "/fill-mask", method: str = "POST") -> Scope:
    return {"type": "http", "method": method, "path": path, "headers": []}


class Service:
    """Admission to two models, which answer everything."""

    def __init__(self, app: ASGIApp) -> None:
        self.diary = Diary()
        self._limits = {
            name: make_limits(max_concurrency=LIMIT, observer=self.diary)
            for name in (None, "second")
        }
        self.control = AdmissionControl(app, find=self._find)

    def _find(self, target: RequestTarget) -> tuple[Limits, str] | None:
        return (self._limits[target.model], target.task) if target.task else None

    @property
    def num_refused(self) -> int:
        return self.diary.counts["shed", "fill-mask"]


class Application:
    """An application that reads the body, and answers when it is told to."""

    def __init__(self) -> None:
        self.num = 0
        self.open = asyncio.Event()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self.num += 1
        while (await receive()).get("more_body"):
            pass
        await self.open.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def ask(
    service: Service,
    request: Scope | None = None,
    body: Sequence[Message] = ({"type": "http.request"},),
) -> list[Message]:
    """The messages of the reply; a body that is not complete stays so."""
    parts = iter(body)
    sent: list[Message] = []

    async def receive() -> Message:
        for part in parts:
            return part
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await service.control(request or scope(), receive, send)
    return sent


async def fill(service: Service, **options: Any) -> list[asyncio.Task[list[Message]]]:
    tasks = [asyncio.create_task(ask(service, **options)) for _ in range(LIMIT)]
    await asyncio.sleep(0)
    return tasks


@on_event_loop
async def test_a_request_over_the_limit_is_refused_unread() -> None:
    inside = Application()
    full = Service(inside)
    tasks = await fill(full)
    start, body = await ask(full)
    headers = dict(start["headers"])
    assert inside.num == LIMIT
    assert (start["status"], headers[b"retry-after"], full.num_refused) == (429, b"1", 1)
    error = json.loads(body["body"])
    assert error["error_type"] == "overloaded"
    assert error["error"] == "8 requests are in progress; the limit is 8. Try again later."
    inside.open.set()
    await asyncio.gather(*tasks)
    (start,) = await ask(full)
    assert start["status"] == 200


@pytest.mark.parametrize(
    "other",
    [
        scope("/v1/models/second/fill-mask"),
        scope("/livez"),
        scope("/v1/models"),
        *(scope(method=method) for method in ("GET", "HEAD", "OPTIONS")),
    ],
    ids=lambda other: f"{other['method']} {other['path']}",
)
@on_event_loop
async def test_each_model_has_its_own_limit_and_all_else_has_none(other: Scope) -> None:
    inside = Application()
    full = Service(inside)
    tasks = await fill(full)
    admitted = asyncio.create_task(ask(full, other))
    await asyncio.sleep(0)
    inside.open.set()
    assert (await admitted)[0]["status"] == 200
    await asyncio.gather(*tasks)


@on_event_loop
async def test_slow_readers_do_not_use_up_the_limit() -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(_message: Message) -> None:
        await asyncio.Event().wait()

    inside = Application()
    inside.open.set()
    full = Service(inside)
    tasks = [asyncio.create_task(full.control(scope(), receive, send)) for _ in range(LIMIT)]
    await asyncio.sleep(0)
    (start,) = await ask(full)
    assert (start["status"], full.num_refused) == (200, 0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@on_event_loop
async def test_requests_that_arrive_together_do_not_exceed_the_limit() -> None:
    """Though middleware reads a request in a later iteration than the one that admits it."""
    inside = Application()

    async def later(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.create_task(inside(scope, receive, send))

    full = Service(later)
    tasks = [asyncio.create_task(ask(full)) for _ in range(3 * LIMIT)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert (inside.num, full.num_refused) == (LIMIT, 2 * LIMIT)
    inside.open.set()
    statuses = [reply[0]["status"] for reply in await asyncio.gather(*tasks)]
    assert (statuses.count(200), statuses.count(429)) == (LIMIT, 2 * LIMIT)


@on_event_loop
async def test_an_error_before_the_body_is_read_frees_the_slot() -> None:
    async def unauthorized(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    empty = Service(unauthorized)
    for _ in range(3 * LIMIT):
        (start,) = await ask(empty)
        assert start["status"] == 401


@on_event_loop
async def test_a_body_that_is_read_after_the_reply_has_begun_has_no_slot() -> None:
    async def refuse_and_drain(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await receive()
        await asyncio.Event().wait()

    full = Service(refuse_and_drain)
    tasks = [*await fill(full), asyncio.create_task(ask(full))]
    await asyncio.sleep(0)
    assert full.num_refused == 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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


async def request(running: Running) -> tuple[int, bool]:
    """The status of one request over a connection of its own, and whether it says when to retry."""
    async with AsyncExitStack() as stack:
        reader, writer = await connect(running, stack)
        writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
        reply = await reader.read()
        return int(reply.split()[1]), b"retry-after: " in reply.lower()


def test_512_clients_at_once_get_200_or_429(service: Running) -> None:
    async def ask_all() -> list[tuple[int, bool]]:
        return await asyncio.gather(*(request(service) for _ in range(NUM_CLIENTS)))

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
            return [await request(service) for _ in range(20)]

    assert set(asyncio.run(ask_beside())) == {(200, False)}
