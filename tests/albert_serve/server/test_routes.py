"""What the routes answer when the engine is slow or fails, or a caller goes; and their limits.

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
from starlette.types import Message, Receive, Scope, Send

from albert_serve.batching.queue import Batcher
from albert_serve.bundle.manifest import Bundle
from albert_serve.errors import EngineError, QueueFullError
from albert_serve.runtime.engine import Engine
from albert_serve.server.errors import ErrorReplies
from albert_serve.server.limits import Admission, AdmissionControl, LargeRequests, Limits
from albert_serve.server.metrics import Metrics
from albert_serve.server.models import HostedModel, Models, describe_hosted
from albert_serve.server.routes import make_app
from albert_serve.settings import RuntimeOptions, Settings
from albert_serve.tasks import EncoderInput, Logits, load_tasks
from tests.albert_serve.batching.engines import make_limits, on_event_loop
from tests.albert_serve.server.conftest import JSON, assert_envelope

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

    app: AdmissionControl
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

    async def post(self) -> httpx.Response:
        return await self.http.post(f"{MODEL}/fill-mask", json=REQUEST)

    async def started(self) -> asyncio.Task[httpx.Response]:
        """A request that the engine is busy with."""
        task = asyncio.create_task(self.post())
        while not self.engine.num_inputs:
            await asyncio.sleep(0.001)
        return task


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture(scope="module")
def engine(bundle_dir: Path) -> Engine:
    return Engine.open(bundle_dir, RuntimeOptions(num_threads=1))


@asynccontextmanager
async def serve(engine: Engine, bundle_dir: Path, **options: Any) -> AsyncIterator[Service]:
    registry = CollectorRegistry()
    bundle = Bundle.open(bundle_dir)
    slow = SlowEngine(engine)
    tasks = load_tasks(bundle)
    del tasks["sentence-order"]
    observer = Metrics(registry).observer("tiny", "fp32", [*tasks])
    settings = Settings(bundle=bundle_dir, **options)
    limits = Limits("tiny", settings, LargeRequests(max_bytes=1 << 20), observer)
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
    wrapped = AdmissionControl(ErrorReplies(app), find=models.find)
    async with client_of(wrapped) as http:
        yield Service(app=wrapped, http=http, engine=slow, models=models, registry=registry)
        slow.gate.set()
        await models.close()


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
        assert_envelope(reply, 429, "overloaded")
        assert reply.headers["Retry-After"] == "1"
    assert [reply.status_code for reply in (running.result(), again)] == [200, 200]


@on_event_loop
async def test_requests_over_the_concurrency_are_429_unread_though_they_arrive_together(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """Other models, other methods and paths of no task have no part in a model's limit."""
    async with serving(max_concurrency=2) as service:
        calls = [asyncio.create_task(service.post()) for _ in range(6)]
        while service.count("shed") != 4:
            await asyncio.sleep(0.001)
        done = [call.result() for call in calls if call.done()]
        for refused in done:
            message = assert_envelope(refused, 429, "overloaded")
            assert message.startswith("2 requests are in progress; the limit is 2.")
        assert len(done) == 4
        assert caplog.messages == ["1 requests were rejected, the last to tiny."]
        for path, status in (("/health", 200), ("/fill-mask", 405), ("/v1/models", 200)):
            assert (await service.http.get(path)).status_code == status
        other = await service.http.post("/v1/models/none/fill-mask", json=REQUEST)
        assert other.status_code == 404
        service.engine.gate.set()
        assert [(await call).status_code for call in calls].count(200) == 2
        assert (await service.post()).status_code == 200


@on_event_loop
async def test_a_request_over_the_queue_is_refused_before_it_is_encoded(serving: Serving) -> None:
    async with serving(max_queue_tokens=3) as service:
        assert_envelope(await service.post(), 422, "too_much_at_once")
        assert service.engine.num_inputs == 0


@on_event_loop
async def test_no_answer_and_no_body_in_time_are_504(serving: Serving) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        yield b'{"inputs": '
        await asyncio.sleep(20)

    async with serving(deadline_s=0.05) as service:
        assert_envelope(await service.post(), 504, "deadline")
        reply = await service.http.post(f"{MODEL}/fill-mask", content=trickle(), headers=JSON)
        assert "body" in assert_envelope(reply, 504, "deadline")
        assert service.count("expired") == 2
        assert service.count("shed") == 0


@pytest.mark.parametrize(
    ("failure", "error_type", "message"),
    [
        pytest.param(EngineError("/secret/file"), "engine", "model failed", id="engine"),
        pytest.param(KeyError("secret"), "internal", "unexpected error", id="bug"),
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
        assert message in assert_envelope(reply, 500, error_type)
        (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert reply.json()["request_id"] in logged.getMessage()
        assert "secret" in str(logged.exc_info)
        assert "secret" not in reply.text
        service.engine.failure = None
        assert (await service.post()).status_code == 200


@on_event_loop
async def test_draining_refuses_new_requests_with_503_and_finishes_old_ones(
    serving: Serving,
) -> None:
    async with serving() as service:
        assert (await service.http.get("/health")).json() == {"status": "ok"}
        running = await service.started()
        closing = asyncio.create_task(service.models.close())
        await asyncio.sleep(0.01)
        assert_envelope(await service.http.get("/health"), 503, "not_ready")
        assert not closing.done()
        service.engine.gate.set()
        assert (await running).status_code == 200
        await closing
        assert_envelope(await service.post(), 503, "not_ready")


@on_event_loop
async def test_before_it_is_started_everything_is_503() -> None:
    async with client_of(ErrorReplies(make_app(dict))) as http:
        assert_envelope(await http.post(f"{MODEL}/fill-mask", json=REQUEST), 503, "not_ready")
        assert_envelope(await http.get("/info"), 503, "not_ready")


@on_event_loop
async def test_work_of_a_caller_who_has_gone_leaves_the_queue(serving: Serving) -> None:
    body = b'{"inputs": "The [MASK] run."}'
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    gone = asyncio.Event()

    async def receive() -> Message:
        for message in messages:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope: Scope = {"type": "http", "method": "POST", "query_string": b"", "headers": headers}
    scope["path"] = f"{MODEL}/fill-mask"
    async with serving() as service:
        running = await service.started()
        leaving = asyncio.create_task(service.app(scope, receive, send))
        while not service.batcher.num_queued_tokens:
            await asyncio.sleep(0.001)
        gone.set()
        await leaving
        assert service.batcher.num_queued_tokens == 0
        assert service.count("cancelled") == 1
        assert sent[0]["status"] == 499  # for the log
        service.engine.gate.set()
        await running
    assert service.engine.num_inputs == 1


@pytest.mark.parametrize("has_reply", [False, True])
def test_a_slot_is_free_once_the_reply_begins_or_the_request_fails(has_reply: bool) -> None:
    limits, seen = make_limits(max_concurrency=1), list[int]()

    async def fail(_scope: Scope, _receive: Receive, send: Send) -> None:
        seen.append(limits.num_requests)
        if has_reply:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ArithmeticError

    async def send(_message: Message) -> None:
        seen.append(limits.num_requests)

    control = AdmissionControl(fail, find=lambda target: (limits, str(target.task)))
    scope: Scope = {"type": "http", "method": "POST", "path": "/fill-mask"}
    receive: Any = None  # nobody reads the body
    with pytest.raises(ArithmeticError):
        asyncio.run(control(scope, receive, send))
    assert [*seen, limits.num_requests] == ([1, 0, 0] if has_reply else [1, 0])


SMALL_BYTES = 4096
LARGE_BYTES = SMALL_BYTES + 1


def admission(limits: Limits) -> Admission:
    return Admission(limits, "fill-mask")


def test_large_bodies_have_one_bound_which_a_single_one_may_exceed() -> None:
    limits = make_limits(max_held_bytes=2 * LARGE_BYTES)
    with admission(limits) as alone:
        alone.count_bytes(3 * LARGE_BYTES)
    with admission(limits) as first, admission(limits) as third:
        first.count_bytes(SMALL_BYTES)
        assert limits.large.num_bytes == 0
        first.count_bytes(LARGE_BYTES)
        with admission(limits) as second:
            second.count_bytes(LARGE_BYTES)
            third.count_bytes(SMALL_BYTES)
            with pytest.raises(QueueFullError, match="8194 bytes"):
                third.count_bytes(LARGE_BYTES)
            assert limits.large.num_bytes == 2 * LARGE_BYTES
        with pytest.raises(QueueFullError):
            third.count_bytes(LARGE_BYTES + 1)
        third.count_bytes(LARGE_BYTES)
        assert not limits.unused.is_set()
    assert limits.large.num_bytes == 0
    assert limits.unused.is_set()
