"""The routes with a slow or failing engine, with clients that disconnect, and their limits.

The tests call the real application, with its middleware, in this process. The engine waits until
the test opens its gate.
"""

from __future__ import annotations

import asyncio
import json
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

from albert_serve.errors import EngineError, QueueFullError
from albert_serve.runtime.engine import Engine
from albert_serve.server.errors import ErrorReplies
from albert_serve.server.limits import Admission, AdmissionControl
from albert_serve.server.metrics import Metrics
from albert_serve.server.models import Models
from albert_serve.server.routes import make_app
from albert_serve.settings import RuntimeOptions, Settings
from albert_serve.tasks import EncoderInput, Logits
from tests.albert_serve.batching.engines import make_limits, on_event_loop
from tests.albert_serve.server.conftest import JSON, assert_envelope

REQUEST = {"inputs": "The [MASK] run."}
MODEL = "/v1/models/tiny"
Serving = Callable[..., AbstractAsyncContextManager["Service"]]


class SlowEngine:
    """The real engine behind a gate. If `failure` is set, it raises this error."""

    def __init__(self, engine: Engine) -> None:
        self.max_batch_tokens = engine.max_batch_tokens
        self.call_overhead_tokens = engine.call_overhead_tokens
        self.warm_up = engine.warm_up
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
    """The application, its client, engine, models and metrics."""

    app: AdmissionControl
    http: httpx.AsyncClient
    engine: SlowEngine
    models: Models
    registry: CollectorRegistry

    def count(self, reason: str) -> float | None:
        """Return the number of requests that were given up for this reason, from the metrics."""
        labels = {"model": "tiny", "task": "fill-mask", "reason": reason}
        return self.registry.get_sample_value("albert_serve_requests_given_up_total", labels)

    async def post(self) -> httpx.Response:
        return await self.http.post(f"{MODEL}/fill-mask", json=REQUEST)

    async def occupy_engine(self) -> asyncio.Task[httpx.Response]:
        """Send a request, and wait until the engine runs it."""
        task = asyncio.create_task(self.post())
        await wait_until(lambda: self.engine.num_inputs > 0)
        return task


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture(scope="module")
def engine(bundle_dir: Path) -> Engine:
    return Engine.open(bundle_dir, RuntimeOptions(num_threads=1))


@pytest.fixture
def serving(engine: Engine, bundle_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """A function that opens a service with some settings."""

    @asynccontextmanager
    async def serve(**options: Any) -> AsyncIterator[Service]:
        slow, registry = SlowEngine(engine), CollectorRegistry()
        monkeypatch.setattr(Engine, "open", lambda *_: slow)
        models = Models.load(Settings(bundle=bundle_dir, **options), Metrics(registry))
        app = make_app(dict)
        app.state.models = models
        wrapped = AdmissionControl(ErrorReplies(app), find=models.find)
        async with client_of(wrapped) as http:
            yield Service(app=wrapped, http=http, engine=slow, models=models, registry=registry)
            slow.gate.set()
            await models.close()

    return serve


async def wait_until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.001)


@on_event_loop
async def test_a_request_to_a_full_queue_is_429_until_there_is_room(serving: Serving) -> None:
    """A request that is larger than the queue is rejected before it runs."""
    num_requests = 5  # the queue has room for one of them
    async with serving(max_queue_tokens=10) as service:
        large = await service.http.post(f"{MODEL}/fill-mask", json={"inputs": "a [MASK] " * 5})
        assert_envelope(large, 422, "too_much_at_once")
        assert service.engine.num_inputs == 0
        running = await service.occupy_engine()
        requests = [asyncio.create_task(service.post()) for _ in range(num_requests)]
        await wait_until(lambda: service.count("shed") == num_requests - 1)
        service.engine.gate.set()
        replies = await asyncio.gather(*requests)
        later_reply = await service.post()
    rejections = [reply for reply in replies if reply.status_code != 200]
    assert len(rejections) == num_requests - 1
    for reply in rejections:
        assert_envelope(reply, 429, "overloaded")
        assert reply.headers["Retry-After"] == "1"
    assert [reply.status_code for reply in (running.result(), later_reply)] == [200, 200]


@on_event_loop
async def test_requests_over_the_concurrency_limit_are_429_if_all_arrive_together(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests to other models, other methods and other paths do not count."""
    async with serving(max_concurrency=2) as service:
        requests = [asyncio.create_task(service.post()) for _ in range(6)]
        await wait_until(lambda: service.count("shed") == 4)
        rejections = [request.result() for request in requests if request.done()]
        for reply in rejections:
            message = assert_envelope(reply, 429, "overloaded")
            assert message.startswith("2 requests are in progress; the limit is 2.")
        assert len(rejections) == 4
        assert caplog.messages == ["1 requests were rejected, the last to tiny."]
        for path, status in (("/health", 200), ("/fill-mask", 405), ("/v1/models", 200)):
            assert (await service.http.get(path)).status_code == status
        reply = await service.http.post("/v1/models/none/fill-mask", json=REQUEST)
        assert reply.status_code == 404
        service.engine.gate.set()
        assert [(await request).status_code for request in requests].count(200) == 2
        assert (await service.post()).status_code == 200


@on_event_loop
async def test_a_late_answer_and_a_late_body_are_504(serving: Serving) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        yield b'{"inputs": '
        await asyncio.sleep(20)

    async with serving(deadline_s=0.05) as service:
        assert_envelope(await service.post(), 504, "deadline")
        reply = await service.http.post(f"{MODEL}/fill-mask", content=trickle(), headers=JSON)
        assert "body" in assert_envelope(reply, 504, "deadline")
        assert service.count("expired") == 2
        assert service.count("shed") == 0


@on_event_loop
async def test_a_failure_is_500_and_its_details_are_only_logged(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as service:
        service.engine.gate.set()
        for failure, error_type, message in (
            (EngineError("/secret/file"), "engine", "model failed"),
            (KeyError("secret"), "internal", "unexpected error"),
        ):
            caplog.clear()
            service.engine.failure = failure
            reply = await service.post()
            assert message in assert_envelope(reply, 500, error_type)
            (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
            assert reply.json()["request_id"] in record.getMessage()
            assert "secret" in str(record.exc_info)
            assert "secret" not in reply.text
        service.engine.failure = None
        assert (await service.post()).status_code == 200


@on_event_loop
async def test_a_closing_service_finishes_old_requests_and_replies_503_to_new_ones(
    serving: Serving,
) -> None:
    async with serving() as service:
        assert (await service.http.get("/health")).json() == {"status": "ok"}
        running = await service.occupy_engine()
        closing = asyncio.create_task(service.models.close())
        await asyncio.sleep(0.01)
        assert_envelope(await service.http.get("/health"), 503, "not_ready")
        assert not closing.done()
        service.engine.gate.set()
        assert (await running).status_code == 200
        await closing
        assert_envelope(await service.post(), 503, "not_ready")


@on_event_loop
async def test_before_startup_every_reply_is_503() -> None:
    async with client_of(ErrorReplies(make_app(dict))) as http:
        assert_envelope(await http.post(f"{MODEL}/fill-mask", json=REQUEST), 503, "not_ready")
        assert_envelope(await http.get("/info"), 503, "not_ready")


@on_event_loop
async def test_a_request_leaves_the_queue_if_its_client_disconnects(serving: Serving) -> None:
    received, sent = asyncio.Queue[Message](), asyncio.Queue[Message]()
    await received.put({"type": "http.request", "body": json.dumps(REQUEST).encode()})
    headers = [(b"content-type", b"application/json")]
    scope: Scope = {"type": "http", "method": "POST", "query_string": b"", "headers": headers}
    scope["path"] = f"{MODEL}/fill-mask"
    async with serving() as service:
        running = await service.occupy_engine()
        request = asyncio.create_task(service.app(scope, received.get, sent.put))
        batcher = service.models.default.batcher
        await wait_until(lambda: batcher.num_queued_tokens > 0)
        await received.put({"type": "http.disconnect"})
        await request
        assert batcher.num_queued_tokens == 0
        assert service.count("cancelled") == 1
        assert sent.get_nowait()["status"] == 499  # the log has this status
        service.engine.gate.set()
        await running
    assert service.engine.num_inputs == 1


@on_event_loop
async def test_a_request_stops_counting_when_its_reply_begins_or_it_fails() -> None:
    limits, counts = make_limits(max_concurrency=1), list[int]()

    async def fail(scope: Scope, _receive: Receive, send: Send) -> None:
        counts.append(limits.num_requests)
        if scope["has_reply"]:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ArithmeticError

    async def send(_message: Message) -> None:
        counts.append(limits.num_requests)

    control: Any = AdmissionControl(fail, find=lambda target: (limits, str(target.task)))
    for has_reply in (False, True):
        scope = {"type": "http", "method": "POST", "path": "/fill-mask", "has_reply": has_reply}
        with pytest.raises(ArithmeticError):
            await control(scope, None, send)  # the body is not read
        counts.append(limits.num_requests)
    assert counts == [1, 0, 1, 0, 0]


def test_the_limit_of_queued_tokens_is_exact() -> None:
    limits = make_limits(max_queue_tokens=100)
    limits.check_tokens(10, 90)
    with pytest.raises(QueueFullError, match=r"^11 tokens .* 10 more tokens"):
        limits.check_tokens(11, 90)


SMALL_BYTES = 4096
LARGE_BYTES = SMALL_BYTES + 1


def test_large_bodies_share_a_limit_that_a_single_body_may_exceed() -> None:
    limits = make_limits(max_held_bytes=2 * LARGE_BYTES)
    with Admission(limits, "fill-mask") as single:
        single.count_bytes(2 * LARGE_BYTES)
        single.count_bytes(3 * LARGE_BYTES)
    with Admission(limits, "fill-mask") as first, Admission(limits, "fill-mask") as third:
        first.count_bytes(SMALL_BYTES)
        assert limits.large.num_bytes == 0
        first.count_bytes(LARGE_BYTES)
        with Admission(limits, "fill-mask") as second:
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
