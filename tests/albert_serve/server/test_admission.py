"""Who is let in: as many as are answered within the time, whoever sends slowly apart."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send

from albert_serve.server.admission import AdmissionController, ConcurrencyLimiter
from albert_serve.server.paths import Target

FIRST = 256
LEAST = 72


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def serve_full(limiter: ConcurrencyLimiter, clock: FakeClock, per_s: float, seconds: float) -> None:
    """As many come as are let in, and they are answered at this rate."""
    ends_s = clock.now_s + seconds
    while clock.now_s < ends_s:
        while not limiter.is_full():
            limiter.admit()
        clock.now_s += 1 / per_s
        limiter.release()


def emptied(max_latency_s: float, per_s: float) -> tuple[ConcurrencyLimiter, FakeClock]:
    """A place that was full for long, at this rate, and that everybody has left."""
    clock = FakeClock()
    limiter = ConcurrencyLimiter(max_latency_s, clock)
    serve_full(limiter, clock, per_s, 10)
    while limiter.num_requests:
        limiter.release()
    return limiter, clock


@settings(max_examples=30, deadline=None)
@given(per_s=st.floats(1, 500), max_latency_s=st.floats(0.1, 20))
def test_a_full_place_holds_what_is_answered_in_the_time(
    per_s: float, max_latency_s: float
) -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(max_latency_s, clock)
    serve_full(limiter, clock, per_s, max(20.0, 60 / per_s))
    assert limiter.limit == pytest.approx(max(LEAST, per_s * max_latency_s), rel=0.05, abs=2)


def test_a_place_that_becomes_slow_takes_fewer() -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(1.0, clock)
    serve_full(limiter, clock, 500, 10)
    serve_full(limiter, clock, 100, 20)
    assert limiter.limit == pytest.approx(100, rel=0.05)


def test_few_requests_do_not_make_the_place_small() -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(1.0, clock)
    for _ in range(50):
        limiter.admit()
        clock.now_s += 1
        limiter.release()
    assert limiter.limit == FIRST


def test_what_is_busy_but_not_full_is_measured_too() -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(1.0, clock)
    for _ in range(50):
        limiter.admit()
    for _ in range(100):
        clock.now_s += 0.1
        limiter.admit()
        limiter.release()
    assert limiter.limit == LEAST
    assert limiter.expected_latency_s == pytest.approx(5.0, rel=0.05)


def test_a_rush_after_an_idle_time_is_measured_from_its_start() -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(1.0, clock)
    limiter.admit()
    clock.now_s += 1000
    limiter.release()
    serve_full(limiter, clock, 100, 10)
    assert limiter.limit == pytest.approx(100, rel=0.05)


def test_what_is_late_does_not_count_as_answered() -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(1.0, clock)
    for number in range(20_000):
        while not limiter.is_full():
            limiter.admit()
        clock.now_s += 0.001
        limiter.release(200 if number % 10 == 0 else 504)
    assert limiter.limit == pytest.approx(100, rel=0.05)


def test_an_idle_time_teaches_nothing() -> None:
    limiter, clock = emptied(1.0, per_s=500)
    clock.now_s += 1
    for _ in range(50):
        limiter.admit()
        clock.now_s += 1
        limiter.release()
    assert limiter.limit > 450


def test_bursts_with_long_times_between_them_do_not_make_the_place_small() -> None:
    limiter, clock = emptied(0.5, per_s=400)
    for _ in range(30):
        for _ in range(20):
            limiter.admit()
        for _ in range(20):
            clock.now_s += 1 / 400
            limiter.release()
        clock.now_s += 60
    assert limiter.limit == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize("status", [422, 429, 499, None])
def test_refusals_teach_nothing(status: int | None) -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(0.5, clock)
    serve_full(limiter, clock, 500, 10)
    for _ in range(30_000):
        while not limiter.is_full():
            limiter.admit()
        clock.now_s += 0.001
        limiter.release(status)
    assert limiter.limit == pytest.approx(250, rel=0.05)


@pytest.mark.parametrize(("num_more", "most"), [(0, LEAST), (50, LEAST), (1300, 42)])
def test_a_rush_makes_the_place_smaller_until_it_is_over(num_more: int, most: int) -> None:
    """At 84 answers a second, with so many refused in each."""
    clock = FakeClock()
    limiter = ConcurrencyLimiter(0.5, clock)
    for second in range(20):
        for number in range(84):
            while not limiter.is_full():
                limiter.admit()
            for _ in range(num_more // 84 + (number < num_more % 84)):
                limiter.count_refusal()
            clock.now_s += 1 / 84
            limiter.release()
        assert second < 3 or limiter.limit == pytest.approx(most, abs=1)
    serve_full(limiter, clock, 84, 5)
    assert limiter.limit == LEAST


def test_a_model_that_answers_nothing_in_time_takes_few() -> None:
    clock = FakeClock()
    limiter = ConcurrencyLimiter(0.5, clock)
    serve_full(limiter, clock, 500, 10)
    for _ in range(60):
        while not limiter.is_full():
            limiter.admit()
        clock.now_s += 1
        limiter.release(504)
    assert limiter.limit == LEAST


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
    controller: AdmissionController, given: Scope, body: list[Message] | None = None
) -> list[Message]:
    """What is answered; a body without an end never comes."""
    parts = iter([{"type": "http.request"}] if body is None else body)
    sent: list[Message] = []

    async def receive() -> Message:
        for part in parts:
            return part
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await controller(given, receive, send)
    return sent


async def filled(
    inside: FakeApplication, **given: Any
) -> tuple[AdmissionController, list[asyncio.Task[list[Message]]]]:
    directory = FakeDirectory()
    controller = AdmissionController(
        inside, lambda: directory, max_latency_s=1.0, max_batch_latency_s=1.0
    )
    tasks = [asyncio.create_task(ask(controller, scope(), **given)) for _ in range(FIRST)]
    await asyncio.sleep(0)
    return controller, tasks


def test_one_too_many_is_refused_without_being_read() -> None:
    async def check() -> None:
        inside = FakeApplication()
        controller, tasks = await filled(inside)
        start, body = await ask(controller, scope())
        assert inside.num == FIRST
        assert start["status"] == 429
        assert dict(start["headers"])[b"retry-after"] == b"1"
        assert json.loads(body["body"])["error_type"] == "overloaded"
        inside.open.set()
        await asyncio.gather(*tasks)
        (start,) = await ask(controller, scope())
        assert start["status"] == 200

    asyncio.run(check())


def test_refusals_can_be_read_by_pages_that_may() -> None:
    async def check() -> None:
        inside = FakeApplication()
        cors = partial(CORSMiddleware, allow_origins=["https://a.example.com"])
        directory = FakeDirectory()
        controller = AdmissionController(inside, lambda: directory, 1.0, 1.0, around_refusals=cors)
        tasks = [asyncio.create_task(ask(controller, scope())) for _ in range(FIRST)]
        await asyncio.sleep(0)
        given = scope()
        given["headers"].append((b"origin", b"https://a.example.com"))
        start, _ = await ask(controller, given)
        assert start["status"] == 429
        headers = dict(start["headers"])
        assert headers[b"access-control-allow-origin"] == b"https://a.example.com"
        inside.open.set()
        await asyncio.gather(*tasks)

    asyncio.run(check())


def test_batch_jobs_and_what_is_no_task_are_let_in_beside_it() -> None:
    async def check() -> None:
        inside = FakeApplication()
        controller, tasks = await filled(inside)
        inside.open.set()
        for other in (scope(priority="batch"), scope("/livez"), scope("/v1/models")):
            (start,) = await ask(controller, other)
            assert start["status"] == 200
        await asyncio.gather(*tasks)

    asyncio.run(check())


def test_another_model_is_let_in_beside_it() -> None:
    async def check() -> None:
        inside = FakeApplication()
        controller, tasks = await filled(inside)
        beside = asyncio.create_task(ask(controller, scope("/v1/models/second/fill-mask")))
        await asyncio.sleep(0)
        inside.open.set()
        assert (await beside)[0]["status"] == 200
        await asyncio.gather(*tasks)

    asyncio.run(check())


def test_who_reads_slowly_keeps_nobody_out() -> None:
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

        tasks = [asyncio.create_task(ask_and_never_read()) for _ in range(FIRST)]
        await asyncio.sleep(0)
        (start,) = await ask(controller, scope())
        assert start["status"] == 200
        assert directory.num_refused == 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(check())


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_what_is_no_request_of_a_task_is_answered_by_others(method: str) -> None:
    async def check() -> None:
        inside = FakeApplication()
        controller, tasks = await filled(inside)
        inside.open.set()
        (start,) = await ask(controller, {**scope(), "method": method})
        assert start["status"] == 200
        await asyncio.gather(*tasks)

    asyncio.run(check())


def test_who_sends_slowly_keeps_nobody_out() -> None:
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
