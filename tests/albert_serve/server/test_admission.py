"""Requests over the concurrency limit are refused unread; slow clients do not use it up."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.batching.admission import RefusalPacer
from albert_serve.errors import QueueFullError
from albert_serve.server.admission import AdmissionController
from albert_serve.server.paths import Target

INITIAL = 128


def scope(path: str = "/fill-mask", priority: str = "interactive") -> Scope:
    headers = [(b"x-priority", priority.encode())]
    return {"type": "http", "method": "POST", "path": path, "headers": headers}


class FakeDirectory:
    """Two models, each with one task."""

    def __init__(self) -> None:
        self.num_refused = 0

    def find_task(self, target: Target) -> tuple[str, str] | None:
        return (target.model or "first", target.task) if target.task else None

    def count_refusal(self, model: str, task: str) -> None:
        assert (model, task) == ("first", "fill-mask")
        self.num_refused += 1


class FakeApplication:
    """An application that reads the body and answers when it is told to."""

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
    controller: AdmissionController, request_scope: Scope, body: list[Message] | None = None
) -> list[Message]:
    """The messages of the reply; a body that is not complete stays so."""
    parts = iter([{"type": "http.request"}] if body is None else body)
    sent: list[Message] = []

    async def receive() -> Message:
        for part in parts:
            return part
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await controller(request_scope, receive, send)
    return sent


async def filled(
    inside: FakeApplication, **options: Any
) -> tuple[AdmissionController, list[asyncio.Task[list[Message]]]]:
    directory = FakeDirectory()
    controller = AdmissionController(
        inside, lambda: directory, max_latency_s=1.0, max_batch_latency_s=1.0
    )
    tasks = [asyncio.create_task(ask(controller, scope(), **options)) for _ in range(INITIAL)]
    await asyncio.sleep(0)
    return controller, tasks


def test_a_request_over_the_limit_is_refused_unread() -> None:
    async def check() -> None:
        inside = FakeApplication()
        controller, tasks = await filled(inside)
        start, body = await ask(controller, scope())
        assert inside.num == INITIAL
        assert start["status"] == 429
        assert dict(start["headers"])[b"retry-after"] == b"1"
        assert json.loads(body["body"])["error_type"] == "overloaded"
        inside.open.set()
        await asyncio.gather(*tasks)
        (start,) = await ask(controller, scope())
        assert start["status"] == 200

    asyncio.run(check())


def test_refusals_have_cors_headers_for_allowed_origins() -> None:
    async def check() -> None:
        inside = FakeApplication()
        cors = partial(CORSMiddleware, allow_origins=["https://a.example.com"])
        directory = FakeDirectory()
        controller = AdmissionController(inside, lambda: directory, 1.0, 1.0, around_refusals=cors)
        tasks = [asyncio.create_task(ask(controller, scope())) for _ in range(INITIAL)]
        await asyncio.sleep(0)
        cross_origin = scope()
        cross_origin["headers"].append((b"origin", b"https://a.example.com"))
        start, _ = await ask(controller, cross_origin)
        assert start["status"] == 429
        headers = dict(start["headers"])
        assert headers[b"access-control-allow-origin"] == b"https://a.example.com"
        inside.open.set()
        await asyncio.gather(*tasks)

    asyncio.run(check())


def test_batch_jobs_and_other_paths_are_admitted_at_the_limit_of_interactive_requests() -> None:
    async def check() -> None:
        inside = FakeApplication()
        controller, tasks = await filled(inside)
        inside.open.set()
        for other in (scope(priority="batch"), scope("/livez"), scope("/v1/models")):
            (start,) = await ask(controller, other)
            assert start["status"] == 200
        await asyncio.gather(*tasks)

    asyncio.run(check())


def test_each_model_has_its_own_limit() -> None:
    async def check() -> None:
        inside = FakeApplication()
        controller, tasks = await filled(inside)
        other_model = asyncio.create_task(ask(controller, scope("/v1/models/second/fill-mask")))
        await asyncio.sleep(0)
        inside.open.set()
        assert (await other_model)[0]["status"] == 200
        await asyncio.gather(*tasks)

    asyncio.run(check())


def test_slow_readers_do_not_use_up_the_limit() -> None:
    async def check() -> None:
        inside, directory = FakeApplication(), FakeDirectory()
        inside.open.set()
        controller = AdmissionController(
            inside, lambda: directory, max_latency_s=1.0, max_batch_latency_s=1.0
        )

        async def ask_and_never_read() -> None:
            async def receive() -> Message:
                return {"type": "http.request", "body": b""}

            async def send(_message: Message) -> None:
                await asyncio.Event().wait()

            await controller(scope(), receive, send)

        tasks = [asyncio.create_task(ask_and_never_read()) for _ in range(INITIAL)]
        await asyncio.sleep(0)
        (start,) = await ask(controller, scope())
        assert start["status"] == 200
        assert directory.num_refused == 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(check())


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_other_methods_are_not_limited(method: str) -> None:
    async def check() -> None:
        inside = FakeApplication()
        controller, tasks = await filled(inside)
        inside.open.set()
        (start,) = await ask(controller, {**scope(), "method": method})
        assert start["status"] == 200
        await asyncio.gather(*tasks)

    asyncio.run(check())


def test_slow_senders_do_not_use_up_the_limit() -> None:
    async def check() -> None:
        inside = FakeApplication()
        controller, tasks = await filled(inside, body=[{"type": "http.request", "more_body": True}])
        inside.open.set()
        (start,) = await ask(controller, scope())
        assert start["status"] == 200
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(check())


def test_requests_of_one_iteration_of_the_event_loop_do_not_exceed_the_limit() -> None:
    """BentoML's middleware reads a request in a later iteration than the one that admits it."""

    async def check() -> None:
        inside, directory = FakeApplication(), FakeDirectory()

        async def later(scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.create_task(inside(scope, receive, send))

        controller = AdmissionController(later, lambda: directory, 1.0, 1.0)
        tasks = [asyncio.create_task(ask(controller, scope())) for _ in range(3 * INITIAL)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert inside.num == INITIAL
        assert directory.num_refused == 2 * INITIAL
        inside.open.set()
        replies = await asyncio.gather(*tasks)
        statuses = [reply[0]["status"] for reply in replies]
        assert (statuses.count(200), statuses.count(429)) == (INITIAL, 2 * INITIAL)

    asyncio.run(check())


def test_bodies_that_arrive_together_after_a_while_are_refused_over_twice_the_limit() -> None:
    async def check() -> None:
        inside, directory = FakeApplication(), FakeDirectory()
        controller = AdmissionController(answering_errors(inside), lambda: directory, 1.0, 1.0)
        complete = asyncio.Event()

        async def ask_slowly() -> int:
            sent: list[Message] = []

            async def receive() -> Message:
                await complete.wait()
                return {"type": "http.request", "body": b""}

            async def send(message: Message) -> None:
                sent.append(message)

            await controller(scope(), receive, send)
            status: int = sent[0]["status"]
            return status

        tasks = [asyncio.create_task(ask_slowly()) for _ in range(5 * INITIAL)]
        await asyncio.sleep(0)
        assert directory.num_refused == 0
        complete.set()
        await asyncio.sleep(0)
        inside.open.set()
        statuses = await asyncio.gather(*tasks)
        assert (statuses.count(200), statuses.count(429)) == (2 * INITIAL, 3 * INITIAL)
        assert directory.num_refused == 3 * INITIAL
        (start,) = await ask(controller, scope())
        assert start["status"] == 200

    asyncio.run(check())


def answering_errors(inside: FakeApplication) -> ASGIApp:
    """Answer 429 where the application cannot read on, as the endpoints do."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await inside(scope, receive, send)
        except QueueFullError:
            await send({"type": "http.response.start", "status": 429, "headers": []})

    return application


def test_an_error_before_the_body_is_read_frees_the_slot() -> None:
    async def check() -> None:
        directory = FakeDirectory()

        async def unauthorized(_scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 401, "headers": []})

        controller = AdmissionController(unauthorized, lambda: directory, 1.0, 1.0)
        for _ in range(3 * INITIAL):
            (start,) = await ask(controller, scope())
            assert start["status"] == 401

    asyncio.run(check())


def test_a_refusal_waits_for_the_pacer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        may_go = asyncio.Event()

        async def wait(_pacer: RefusalPacer) -> None:
            await may_go.wait()

        monkeypatch.setattr(RefusalPacer, "wait", wait)
        inside = FakeApplication()
        controller, tasks = await filled(inside)
        refused = asyncio.create_task(ask(controller, scope()))
        await asyncio.sleep(0)
        inside.open.set()
        await asyncio.gather(*tasks)
        assert not refused.done()
        may_go.set()
        assert (await refused)[0]["status"] == 429

    asyncio.run(check())
