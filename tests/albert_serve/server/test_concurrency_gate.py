"""Requests over the concurrency limit are refused unread; slow clients do not use it up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.server.concurrency_gate import ConcurrencyGate
from albert_serve.server.metrics import Metrics
from albert_serve.server.models.registry import Models
from albert_serve.server.paths import RequestTarget
from albert_serve.settings import Settings
from tests.albert_serve.batching.engines import on_event_loop

INITIAL = 128
SETTINGS = Settings.model_construct(max_wait_s=1.0, deadline_s=2.0)


def scope(path: str = "/fill-mask", priority: str = "interactive", method: str = "POST") -> Scope:
    headers = [(b"x-priority", priority.encode())]
    return {"type": "http", "method": method, "path": path, "headers": headers}


class TwoModels(Models):
    """Two models that answer everything."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        super().__init__(SETTINGS, Metrics(self.registry))

    def find_task(self, target: RequestTarget) -> tuple[str, str] | None:
        return (target.model or "first", target.task) if target.task else None

    @property
    def num_refused(self) -> float:
        labels = {"model": "first", "task": "fill-mask", "reason": "shed"}
        name = "albert_serve_requests_given_up_total"
        return self.registry.get_sample_value(name, labels) or 0


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


def gate(app: ASGIApp) -> tuple[ConcurrencyGate, TwoModels]:
    models = TwoModels()
    return ConcurrencyGate(app, lambda: models, SETTINGS), models


async def ask(
    gate: ConcurrencyGate,
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

    await gate(request or scope(), receive, send)
    return sent


async def fill(gate: ConcurrencyGate, **options: Any) -> list[asyncio.Task[list[Message]]]:
    tasks = [asyncio.create_task(ask(gate, **options)) for _ in range(INITIAL)]
    await asyncio.sleep(0)
    return tasks


@on_event_loop
async def test_a_request_over_the_limit_is_refused_unread() -> None:
    inside = Application()
    full, models = gate(inside)
    tasks = await fill(full)
    start, body = await ask(full)
    headers = dict(start["headers"])
    assert inside.num == INITIAL
    assert (start["status"], headers[b"retry-after"], models.num_refused) == (429, b"1", 1)
    assert json.loads(body["body"])["error_type"] == "overloaded"
    inside.open.set()
    await asyncio.gather(*tasks)
    (start,) = await ask(full)
    assert start["status"] == 200


@pytest.mark.parametrize(
    "other",
    [
        scope(priority="batch"),
        scope("/v1/models/second/fill-mask"),
        scope("/livez"),
        scope("/v1/models"),
        *(scope(method=method) for method in ("GET", "HEAD", "OPTIONS")),
    ],
    ids=lambda other: f"{other['method']} {other['path']}",
)
@on_event_loop
async def test_each_model_and_priority_has_its_own_limit_and_all_else_has_none(
    other: Scope,
) -> None:
    inside = Application()
    full, _ = gate(inside)
    tasks = await fill(full)
    admitted = asyncio.create_task(ask(full, other))
    await asyncio.sleep(0)
    inside.open.set()
    assert (await admitted)[0]["status"] == 200
    await asyncio.gather(*tasks)


@on_event_loop
async def test_slow_senders_do_not_use_up_the_limit() -> None:
    inside = Application()
    full, _ = gate(inside)
    tasks = await fill(full, body=[{"type": "http.request", "more_body": True}])
    inside.open.set()
    (start,) = await ask(full)
    assert start["status"] == 200
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@on_event_loop
async def test_slow_readers_do_not_use_up_the_limit() -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(_message: Message) -> None:
        await asyncio.Event().wait()

    inside = Application()
    inside.open.set()
    full, models = gate(inside)
    tasks = [asyncio.create_task(full(scope(), receive, send)) for _ in range(INITIAL)]
    await asyncio.sleep(0)
    (start,) = await ask(full)
    assert (start["status"], models.num_refused) == (200, 0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@on_event_loop
async def test_requests_that_arrive_together_do_not_exceed_the_limit() -> None:
    """Though middleware reads a request in a later iteration than the one that admits it."""
    inside = Application()

    async def later(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.create_task(inside(scope, receive, send))

    full, models = gate(later)
    tasks = [asyncio.create_task(ask(full)) for _ in range(3 * INITIAL)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert (inside.num, models.num_refused) == (INITIAL, 2 * INITIAL)
    inside.open.set()
    statuses = [reply[0]["status"] for reply in await asyncio.gather(*tasks)]
    assert (statuses.count(200), statuses.count(429)) == (INITIAL, 2 * INITIAL)


@on_event_loop
async def test_an_error_before_the_body_is_read_frees_the_slot() -> None:
    async def unauthorized(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    empty, _ = gate(unauthorized)
    for _ in range(3 * INITIAL):
        (start,) = await ask(empty)
        assert start["status"] == 401


@on_event_loop
async def test_many_refusals_at_once_are_sent_late() -> None:
    inside = Application()
    full, _ = gate(inside)
    tasks = await fill(full)
    refused = [asyncio.create_task(ask(full)) for _ in range(50)]
    await asyncio.sleep(0)
    assert refused[0].done()
    assert not refused[-1].done()
    inside.open.set()
    replies = await asyncio.gather(*refused)
    assert {reply[0]["status"] for reply in replies} == {429}
    await asyncio.gather(*tasks)
