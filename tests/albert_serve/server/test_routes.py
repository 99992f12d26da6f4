"""What the routes answer when the engine is slow, fails, or lacks a task; and when a caller goes.

The application is the real one with the middleware around it, called in this process, over an
engine that waits until it is told to go on.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from albert_serve.batching.queue import Batcher
from albert_serve.bundle.manifest import Bundle
from albert_serve.errors import EngineError
from albert_serve.runtime.engine import Engine
from albert_serve.server.errors import ErrorReplies
from albert_serve.server.limits import SMALL_BYTES, LargeRequests, Limits
from albert_serve.server.metrics import Metrics
from albert_serve.server.models import HostedModel, Models, describe_hosted
from albert_serve.server.routes import make_app
from albert_serve.settings import RuntimeOptions, Settings
from albert_serve.tasks import EncoderInput, Logits, load_tasks
from tests.albert_serve.batching.engines import on_event_loop

REQUEST = {"inputs": "The [MASK] run."}
MODEL = "/v1/models/tiny"
Serving = Callable[..., AbstractAsyncContextManager["Service"]]


class SlowEngine:
    """The real engine behind a gate; raises `failure` instead, where there is one."""

    def __init__(self, engine: Engine) -> None:
        self.max_batch_tokens = engine.max_batch_tokens
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.num_inputs = 0
        self._engine = engine

    def run_batch(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        self.num_inputs += len(inputs)
        assert self.gate.wait(timeout=20)
        if self.failure is not None:
            raise self.failure
        return self._engine.run_batch(inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """The application, a client of it, and what stands behind it."""

    app: ErrorReplies
    http: httpx.AsyncClient
    engine: SlowEngine
    models: Models
    registry: CollectorRegistry

    @property
    def batcher(self) -> Batcher:
        return self.models.default.batcher

    def count(self, reason: str) -> float | None:
        """Return how many requests were given up, by the service's metrics."""
        labels = {"model": "tiny", "task": "fill-mask", "reason": reason}
        return self.registry.get_sample_value("albert_serve_requests_given_up_total", labels)

    async def post(self, task: str = "fill-mask") -> httpx.Response:
        return await self.http.post(f"{MODEL}/{task}", json=REQUEST)

    async def started(self) -> asyncio.Task[httpx.Response]:
        """A request that the engine is busy with."""
        task = asyncio.create_task(self.post())
        while not self.engine.num_inputs:
            await asyncio.sleep(0.001)
        return task


@pytest.fixture(scope="module")
def engine(bundle_dir: Path) -> Engine:
    return Engine.open(bundle_dir, RuntimeOptions(num_threads=1))


@asynccontextmanager
async def serve(
    engine: Engine,
    bundle_dir: Path,
    deadline_s: float = 20.0,
    max_queue_tokens: int = 1000,
    max_held_bytes: int = 1 << 20,
) -> AsyncIterator[Service]:
    registry = CollectorRegistry()
    bundle = Bundle.open(bundle_dir)
    slow = SlowEngine(engine)
    tasks = load_tasks(bundle)
    del tasks["sentence-order"]
    observer = Metrics(registry).observer("tiny", "fp32", [*tasks])
    settings = Settings(bundle=bundle_dir, deadline_s=deadline_s, max_queue_tokens=max_queue_tokens)
    limits = Limits("tiny", settings, LargeRequests(max_bytes=max_held_bytes), observer)
    model = HostedModel(
        name="tiny",
        settings=settings,
        bundle=bundle,
        tasks=tasks,
        batcher=Batcher(slow, check_room=limits.check_tokens, observer=observer),
        description=describe_hosted("tiny", bundle, settings, "[MASK]"),
        limits=limits,
    )
    app = make_app(dict)
    app.state.models = models = Models(settings)
    models.served, models.default_name = {"tiny": model}, "tiny"
    wrapped = ErrorReplies(app)
    transport = httpx.ASGITransport(wrapped, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield Service(app=wrapped, http=http, engine=slow, models=models, registry=registry)
        slow.gate.set()
        await model.close()


@pytest.fixture
def serving(engine: Engine, bundle_dir: Path) -> Serving:
    """Opens a service with some settings."""
    return functools.partial(serve, engine, bundle_dir)


@on_event_loop
async def test_a_full_queue_is_429_with_retry_after_and_recovers(serving: Serving) -> None:
    num_queued = 5  # of which one fits beside the one that the engine is busy with
    async with serving(max_queue_tokens=10) as service:
        running = await service.started()
        queued = [asyncio.create_task(service.post()) for _ in range(num_queued)]
        while service.count("shed") != num_queued - 1:
            await asyncio.sleep(0.001)
        service.engine.gate.set()
        replies = await asyncio.gather(*queued)
        again = await service.post()
    refused = [reply for reply in replies if reply.status_code != 200]
    assert len(refused) == num_queued - 1
    for reply in refused:
        assert_error(reply, 429, "overloaded")
        assert int(reply.headers["Retry-After"]) >= 1
    assert [reply.status_code for reply in (running.result(), again)] == [200, 200]


@on_event_loop
async def test_no_answer_in_time_is_504(serving: Serving) -> None:
    async with serving(deadline_s=0.05) as service:
        assert_error(await service.post(), 504, "deadline")
        assert service.count("expired") == 1


@on_event_loop
async def test_a_body_that_does_not_arrive_is_504(serving: Serving) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        yield b'{"inputs": '
        await asyncio.sleep(20)

    async with serving(deadline_s=0.05) as service:
        headers = {"content-type": "application/json"}
        reply = await service.http.post(f"{MODEL}/fill-mask", content=trickle(), headers=headers)
        assert_error(reply, 504, "deadline")
        assert "the body did not arrive" in reply.json()["error"]


@on_event_loop
async def test_unfinished_bodies_have_one_bound_and_small_ones_pass_it(serving: Serving) -> None:
    large, complete = b" " * (SMALL_BYTES + 1), asyncio.Event()

    async def send(service: Service, body: bytes) -> httpx.Response:
        async def content() -> AsyncIterator[bytes]:
            yield body
            await complete.wait()
            yield b'{"inputs": "The [MASK] run."}'

        headers = {"content-type": "application/json"}
        return await service.http.post(f"{MODEL}/fill-mask", content=content(), headers=headers)

    async with serving(max_held_bytes=2 * len(large) + 100) as service:
        service.engine.gate.set()
        bodies = [large, large, large, b" " * (SMALL_BYTES - 100)]
        calls = [asyncio.create_task(send(service, body)) for body in bodies]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert done == {calls[2]}
        assert_error(calls[2].result(), 429, "overloaded")
        assert calls[2].result().headers["Retry-After"] == "1"
        complete.set()
        replies = [*await asyncio.gather(*calls), await send(service, large)]
        assert [reply.status_code for reply in replies] == [200, 200, 429, 200, 200]
        assert service.count("shed") == 1


@pytest.mark.parametrize(
    ("failure", "error_type", "message"),
    [
        pytest.param(EngineError("/secret/file"), "engine", "the model failed", id="engine"),
        pytest.param(KeyError("secret"), "internal", "an unexpected error", id="bug"),
    ],
)
@on_event_loop
async def test_a_failure_is_500_and_says_no_more_than_it_should(
    serving: Serving,
    failure: Exception,
    error_type: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as service:
        service.engine.failure = failure
        service.engine.gate.set()
        reply = await service.post()
        assert_error(reply, 500, error_type)
        (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert reply.json()["request_id"] in logged.getMessage()
        assert "secret" in str(logged.exc_info)
        assert message in reply.json()["error"]
        assert "secret" not in reply.text
        service.engine.failure = None
        assert (await service.post()).status_code == 200


@on_event_loop
async def test_draining_refuses_new_requests_with_503_and_finishes_old_ones(
    serving: Serving,
) -> None:
    async with serving() as service:
        running = await service.started()
        service.models.accepting = False
        closing = asyncio.create_task(service.batcher.close())
        await asyncio.sleep(0)
        assert_error(await service.post(), 503, "not_ready")
        assert_error(await service.http.get("/health"), 503, "not_ready")
        service.engine.gate.set()
        assert (await running).status_code == 200
        await closing


@on_event_loop
async def test_before_it_is_started_everything_is_503() -> None:
    transport = httpx.ASGITransport(ErrorReplies(make_app(dict)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert_error(await http.post(f"{MODEL}/fill-mask", json=REQUEST), 503, "not_ready")
        assert_error(await http.get("/info"), 503, "not_ready")


@on_event_loop
async def test_work_of_a_caller_who_has_gone_leaves_the_queue(serving: Serving) -> None:
    async with serving() as service:
        running = await service.started()
        sent: list[Message] = []
        gone = asyncio.Event()
        leaving = asyncio.create_task(call_and_leave(service.app, gone, sent))
        while not service.batcher.num_queued_tokens:
            await asyncio.sleep(0.001)
        gone.set()
        await leaving
        assert service.batcher.num_queued_tokens == 0
        assert service.count("cancelled") == 1
        service.engine.gate.set()
        await running
    assert service.engine.num_inputs == 1


async def call_and_leave(app: ErrorReplies, gone: asyncio.Event, sent: list[Message]) -> None:
    """A request whose connection closes once `gone` is set."""
    body = b'{"inputs": "The [MASK] run."}'
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in messages:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": f"{MODEL}/fill-mask",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)


def assert_error(reply: httpx.Response, status: int, error_type: str) -> None:
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error", "error_type", "request_id"}
    assert reply.json()["error_type"] == error_type
    assert reply.json()["request_id"] == reply.headers["X-Request-ID"]
