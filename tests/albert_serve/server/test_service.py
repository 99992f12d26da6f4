"""The service process over HTTP: other libraries' clients, other services, load and shutdown."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import bentoml
import httpx
import numpy as np
import pytest
from bentoml.exceptions import UnprocessableEntity
from openai import NotFoundError, OpenAI

from albert_serve.api.schemas import Answer, FilledToken, InfoReply
from albert_serve.server.openapi import EXAMPLES
from tests.albert_serve.client.support import assert_same
from tests.albert_serve.server.conftest import JSON, MASKED, TEXTS, assert_envelope, post
from tests.albert_serve.support import (
    ITEMS,
    MAX_BODY_BYTES,
    MAX_ITEMS,
    ROOT,
    RunningService,
    running_service,
    served,
    service_environment,
    wait_until,
)

# The service has no head for token classification.
VALID = {task: item for task, item in ITEMS.items() if task != "token-classification"}


def test_concurrent_requests_for_all_tasks_get_their_own_answers(client: httpx.Client) -> None:
    examples = {task: EXAMPLES[task]["inputs"] for task in VALID}
    requests = [*VALID.items(), *examples.items()] * 10
    with ThreadPoolExecutor(16) as threads:
        replies = [*threads.map(lambda request: post(client, *request), requests)]
    for (task, inputs), reply in zip(requests, replies, strict=True):
        assert_same(reply.json(), post(client, task, inputs).json())


def test_errors_of_bentomls_routes_and_of_streamed_bodies_have_the_envelope(
    client: httpx.Client,
) -> None:
    chunks = (b" " * 1000 for _ in range(MAX_BODY_BYTES // 1000 + 1))
    assert_envelope(client.get("/static_content/none"), 404, "not_found")
    reply = client.post("/fill-mask", content=chunks, headers=JSON)
    assert_envelope(reply, 413, "body_too_large")
    assert post(client, "fill-mask", MASKED).status_code == 200


def test_openais_client_gets_embeddings_and_lists_the_models(
    service: RunningService, client: httpx.Client
) -> None:
    expected = post(client, "feature-extraction", TEXTS, normalize=True).json()
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as caller:
        for any_caller in (caller.with_options(base_url=f"{service.url}/v1/models/tiny"), caller):
            reply = any_caller.embeddings.create(model="tiny", input=TEXTS)
            embeddings = [item.embedding for item in reply.data]
            np.testing.assert_allclose(embeddings, expected, atol=1e-5)
            with pytest.raises(NotFoundError, match="'tiny'") as caught:
                any_caller.embeddings.create(model="another", input=TEXTS)
            assert caught.value.type == "not_found"
            assert caught.value.request_id
        (model,) = caller.models.list()
        assert (model.id, model.object, model.owned_by) == ("tiny", "model", "albert-serve")
        model = caller.models.retrieve("tiny")
    assert model.model_extra is not None
    assert model.model_extra["tasks"] == client.get("/info").json()["tasks"]


# BentoML and its dependencies emit deprecation warnings.
ignore_warnings_of_bentoml = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@contextmanager
def bentoml_client(url: str) -> Iterator[Any]:
    """Open BentoML's client of a service."""
    with bentoml.SyncHTTPClient(url) as client:
        yield client
        client._temp_dir.cleanup()  # avoids a warning at the end of the process


@pytest.fixture
def native(service: RunningService) -> Iterator[Any]:
    """BentoML's client of the service."""
    with bentoml_client(service.url) as client:
        yield client


def method(client: Any, task: str) -> Any:
    """Return the method of a client, or of a service, for a task."""
    return getattr(client, task.replace("-", "_"))


@ignore_warnings_of_bentoml
def test_bentomls_clients_get_the_replies_and_errors_of_http(
    service: RunningService, native: Any, client: httpx.Client
) -> None:
    async def ask() -> list[Any]:
        async with bentoml.AsyncHTTPClient(service.url) as caller:
            calls = [method(caller, task)(**EXAMPLES[task]) for task in VALID]
            replies = [*await asyncio.gather(*calls), await caller.info()]
            caller._temp_dir.cleanup()
            return replies

    *replies, info = asyncio.run(ask())
    for task, reply in zip(VALID, replies, strict=True):
        assert_same(reply, method(native, task)(**EXAMPLES[task]))
        assert_same(reply, client.post(f"/{task}", json=EXAMPLES[task]).json())
    assert info == native.info()
    assert InfoReply.model_validate(info).model_id == "tiny"
    with pytest.raises(UnprocessableEntity) as caught:
        native.fill_mask("none")
    assert "[MASK]" in json.loads(caught.value.message)["error"]


@ignore_warnings_of_bentoml
def test_a_dependent_service_gets_typed_replies_and_errors(
    bundle_dir: Path, tmp_path: Path, native: Any
) -> None:
    """Our service requires a key, which the other service has."""
    environment = service_environment(bundle_dir, tmp_path)
    key = environment["ALBERT_SERVE_API_KEYS"] = "a-key-between-services"
    environment["BENTO_CLOUD_API_KEY"] = key
    composed_service = "tests.albert_serve.server.composed:Composed"
    command = ("bentoml", "serve", composed_service, "--working-dir", str(ROOT))
    with (
        running_service(environment, tmp_path, command) as running,
        bentoml_client(running.url) as composed,
    ):
        for task, item in VALID.items():
            for inputs in (item, [item] * 2):
                arguments = {"inputs": inputs, "parameters": {"truncation": "truncate"}}
                _, reply = composed.ask(task.replace("-", "_"), arguments)
                assert_same(reply, method(native, task)(inputs))
        question = {"inputs": VALID["question-answering"]}
        types = [composed.ask("question_answering", question)[0], composed.ask("info", {})[0]]
        assert types == [Answer.__name__, "Info"]
        with pytest.raises(UnprocessableEntity, match=r"no \[MASK\]"):
            composed.ask("fill_mask", {"inputs": "none"})


@ignore_warnings_of_bentoml
def test_calls_in_process_return_typed_values_and_raise_bentomls_exceptions(
    bundle_dir: Path, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the other service runs in this process, BentoML does not call our hooks."""
    monkeypatch.setenv("ALBERT_SERVE_BUNDLE", str(bundle_dir))
    from tests.albert_serve.server.composed import Composed

    async def check() -> None:
        albert = cast("Any", Composed()).albert
        best, *_ = await albert.fill_mask(MASKED, {"top_k": 2})
        assert isinstance(best, FilledToken)
        assert_same(best.model_dump(), native.fill_mask(MASKED)[0])
        assert (await albert.info()).model_id == "tiny"
        for inputs, message in (("none", r"no \[MASK\]"), (3, "valid string, not 3")):
            with pytest.raises(UnprocessableEntity, match=message):
                await albert.fill_mask(inputs)
        await cast("Any", Composed).dependencies["albert"].close()

    asyncio.run(check())


NUM_CLIENTS = 512
NUM_UNFINISHED = 200
BODY = json.dumps({"inputs": MASKED}).encode()
HEAD = b"POST /fill-mask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def address_of(running: RunningService) -> tuple[str, int]:
    return "127.0.0.1", int(running.url.rpartition(":")[2])


async def request(running: RunningService) -> tuple[int, bool]:
    """Send a request over a new connection; return its status, and whether it has Retry-After."""
    reader, writer = await asyncio.open_connection(*address_of(running))
    writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
    reply = await reader.read()
    writer.close()
    return int(reply.split()[1]), b"retry-after: " in reply.lower()


def test_512_concurrent_clients_get_200_or_429(service: RunningService) -> None:
    async def ask_all() -> list[tuple[int, bool]]:
        return await asyncio.gather(*(request(service) for _ in range(NUM_CLIENTS)))

    counts = Counter(asyncio.run(ask_all()))
    assert counts.keys() <= {(200, False), (429, True)}
    assert counts[200, False] > 0


def test_unfinished_bodies_do_not_block_other_requests(
    service: RunningService, client: httpx.Client
) -> None:
    with ExitStack() as stack:
        for _ in range(NUM_UNFINISHED):
            connection = stack.enter_context(socket.create_connection(address_of(service)))
            connection.sendall(HEAD + b"Content-Length: 60000\r\n\r\n" + BODY)
        statuses = [post(client, "fill-mask", MASKED).status_code for _ in range(20)]
    assert statuses == [200] * 20


def test_sigterm_finishes_the_accepted_requests(bundle_dir: Path, tmp_path: Path) -> None:
    """The service runs by the command `albert-serve serve`."""
    num_requests = 24
    long_text = {"inputs": ["The [MASK] " + "run " * 100] * MAX_ITEMS}
    with served(bundle_dir, tmp_path, ("albert_serve", "serve")) as running:
        with ThreadPoolExecutor(num_requests) as threads:
            requests = [
                threads.submit(httpx.post, f"{running.url}/fill-mask", json=long_text, timeout=90)
                for _ in range(num_requests)
            ]
            wait_for_requests(running, num_requests)
            assert not all(request.done() for request in requests)
            running.process.send_signal(signal.SIGTERM)
            replies = [request.result() for request in requests]
        assert [reply.status_code for reply in replies] == [200] * num_requests
        assert all(len(reply.json()) == MAX_ITEMS for reply in replies)
        running.process.wait(timeout=60)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/readyz")


def test_during_the_grace_period_the_service_answers_but_is_not_ready(
    bundle_dir: Path, tmp_path: Path
) -> None:
    with served(bundle_dir, tmp_path, DRAIN_GRACE_S="3") as running:
        running.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{running.url}/readyz").status_code == 503, running)
        time.sleep(1)  # without a grace period, the service would end now
        with httpx.Client(base_url=running.url) as client:
            assert post(client, "fill-mask", MASKED).status_code == 200


def wait_for_requests(running: RunningService, num_requests: int) -> None:
    """Wait until BentoML's metrics count this number of requests, in progress or answered."""
    count = re.compile(r'_(?:request_in_progress|total)\{.*"/fill-mask".* (\S+)$', re.MULTILINE)
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        metrics = httpx.get(f"{running.url}/metrics", timeout=20).text
        if sum(map(float, count.findall(metrics))) >= num_requests:
            return
    pytest.fail("the requests did not arrive")
