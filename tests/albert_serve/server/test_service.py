"""The service process over real HTTP: others' clients and services, load, and its end."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import bentoml
import httpx
import numpy as np
import pytest
from bentoml.exceptions import UnprocessableEntity
from huggingface_hub import InferenceClient
from openai import NotFoundError, OpenAI

from albert_serve.api.schemas import Answer, FilledToken, InfoReply
from albert_serve.server.openapi import EXAMPLES
from tests.albert_serve.server.conftest import (
    JSON,
    MASKED,
    VALID,
    assert_close,
    assert_envelope,
    post,
)
from tests.albert_serve.support import (
    MAX_BODY_BYTES,
    MAX_ITEMS,
    ROOT,
    Running,
    running_service,
    served,
    service_environment,
)

TEXTS = ["It rained.", "An earned run is any run that was not enabled by a fielding error."]


def test_tasks_mix_under_load_and_none_gets_anothers_answer(client: httpx.Client) -> None:
    alone = {task: post(client, task, VALID[task]).json() for task in VALID}
    with ThreadPoolExecutor(16) as threads:
        replies = list(
            threads.map(lambda task: (task, post(client, task, VALID[task])), [*VALID] * 20)
        )
    for task, reply in replies:
        assert_close(reply.json(), alone[task])


def test_refusals_of_bentomls_routes_and_of_long_streams_have_the_envelope(
    client: httpx.Client,
) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 1000 + 1):
            yield b" " * 1000

    assert_envelope(client.get("/static_content/none"), 404, "not_found")
    reply = client.post("/fill-mask", content=chunks(), headers=JSON)
    assert_envelope(reply, 413, "body_too_large")
    assert post(client, "fill-mask", MASKED).status_code == 200


@pytest.mark.parametrize("path", ["/v1", "/v1/models/tiny"])
def test_openais_own_client(service: Running, client: httpx.Client, path: str) -> None:
    expected = post(client, "feature-extraction", TEXTS, normalize=True).json()
    with OpenAI(base_url=f"{service.url}{path}", api_key="none", max_retries=0) as caller:
        reply = caller.embeddings.create(model="tiny", input=TEXTS)
        np.testing.assert_allclose([item.embedding for item in reply.data], expected, atol=1e-5)
        with pytest.raises(NotFoundError, match="'tiny'") as caught:
            caller.embeddings.create(model="another", input=TEXTS)
    assert caught.value.type == "not_found"
    assert caught.value.request_id


def test_openais_client_lists_the_models(service: Running, client: httpx.Client) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as caller:
        (listed,) = caller.models.list()
        assert (listed.id, listed.object, listed.owned_by) == ("tiny", "model", "albert-serve")
        retrieved = caller.models.retrieve("tiny")
        assert retrieved.model_extra is not None
        assert retrieved.model_extra["tasks"] == client.get("/info").json()["tasks"]


def test_hugging_faces_client_gets_entities(token_service: Running) -> None:
    hub = InferenceClient(f"{token_service.url}/token-classification")
    text = "Anna Berg lives in Vienna. She came in 1932."
    with httpx.Client(base_url=token_service.url) as http:
        for strategy in ("none", "average"):
            got = hub.token_classification(text, aggregation_strategy=strategy, stride=4)
            options = {"aggregation_strategy": strategy}
            expected = post(http, "token-classification", text, **options).json()
            assert expected
            assert_close([{name: item[name] for name in expected[0]} for item in got], expected)


# Of BentoML and of what it imports.
bentomls_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KEY = "a-key-between-services"
COMPOSED = "tests.albert_serve.server.composed:Composed"


@contextmanager
def calling(url: str) -> Iterator[Any]:
    with bentoml.SyncHTTPClient(url) as client:
        yield client
        client._temp_dir.cleanup()  # else it is the interpreter that does it, with a warning


@pytest.fixture
def native(service: Running) -> Iterator[Any]:
    with calling(service.url) as client:
        yield client


def method(task: str) -> str:
    return task.replace("-", "_")


@bentomls_warnings
def test_bentomls_clients_get_what_http_does_and_raise_our_refusals(
    service: Running, native: Any, client: httpx.Client
) -> None:
    async def ask() -> list[Any]:
        async with bentoml.AsyncHTTPClient(service.url) as caller:
            calls = [getattr(caller, method(task))(**EXAMPLES[task]) for task in VALID]
            replies = [*await asyncio.gather(*calls), await caller.info()]
            caller._temp_dir.cleanup()
            return replies

    *replies, info = asyncio.run(ask())
    for task, reply in zip(VALID, replies, strict=True):
        assert_close(reply, getattr(native, method(task))(**EXAMPLES[task]))
        assert_close(reply, client.post(f"/{task}", json=EXAMPLES[task]).json())
    assert info == native.info()
    assert InfoReply.model_validate(info).model_id == "tiny"
    with pytest.raises(UnprocessableEntity) as refused:
        native.fill_mask("none")
    assert "[MASK]" in json.loads(refused.value.message)["error"]


@bentomls_warnings
def test_another_service_depends_on_ours(bundle_dir: Path, tmp_path: Path, native: Any) -> None:
    """It gets typed replies and our refusals, also where a key is needed."""
    environment = service_environment(bundle_dir, tmp_path)
    environment["ALBERT_SERVE_API_KEYS"] = environment["BENTO_CLOUD_API_KEY"] = KEY
    command = ("bentoml", "serve", COMPOSED, "--working-dir", str(ROOT))
    with (
        running_service(environment, tmp_path, command) as running,
        calling(running.url) as composed,
    ):
        for task, item in VALID.items():
            for inputs in (item, [item] * 2):
                _, reply = composed.ask(method(task), inputs, {"truncation": "truncate"})
                assert_close(reply, getattr(native, method(task))(inputs))
        kind, _ = composed.ask("question_answering", VALID["question-answering"])
        assert kind == Answer.__name__
        name, *tasks = composed.names()
        assert (name, {*tasks}) == ("tiny", {*VALID})
        with pytest.raises(UnprocessableEntity, match=r"no \[MASK\]"):
            composed.ask("fill_mask", "none")


@bentomls_warnings
def test_calls_in_process_take_and_return_values_and_raise_bentomls_exceptions(
    bundle_dir: Path, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a service that depends on ours in this process: BentoML calls none of our hooks."""
    monkeypatch.setenv("ALBERT_SERVE_BUNDLE", str(bundle_dir))
    from tests.albert_serve.server.composed import Composed

    async def check() -> None:
        albert = cast("Any", Composed()).albert
        best, *_ = await albert.fill_mask(MASKED, {"top_k": 2})
        assert isinstance(best, FilledToken)
        assert_close(best.model_dump(), native.fill_mask(MASKED)[0])
        assert (await albert.info()).model_id == "tiny"
        for inputs, message in (("none", r"no \[MASK\]"), (3, "valid string, not 3")):
            with pytest.raises(UnprocessableEntity, match=message):
                await albert.fill_mask(inputs)
        await cast("Any", Composed).dependencies["albert"].close()

    asyncio.run(check())


NUM_CLIENTS = 512
NUM_UNFINISHED = 200
BODY = json.dumps({"inputs": "The run was scored in the first inning."}).encode()
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


def test_unfinished_bodies_keep_nobody_waiting(service: Running) -> None:
    async def ask_beside() -> list[tuple[int, bool]]:
        async with AsyncExitStack() as stack:
            for _ in range(NUM_UNFINISHED):
                _, writer = await connect(service, stack)
                writer.write(HEAD + b"Content-Length: 60000\r\n\r\n" + BODY)
            return [await request(service) for _ in range(20)]

    assert set(asyncio.run(ask_beside())) == {(200, False)}


def test_sigterm_finishes_what_was_accepted(bundle_dir: Path, tmp_path: Path) -> None:
    """Started as a user would start it, which shows the command line's `serve` as well."""
    num_requests = 24
    long_text = {"inputs": ["The [MASK] " + "run " * 100] * MAX_ITEMS}
    with served(bundle_dir, tmp_path, ("albert_serve", "serve")) as running:
        with ThreadPoolExecutor(num_requests) as threads:
            waiting = [
                threads.submit(httpx.post, f"{running.url}/fill-mask", json=long_text, timeout=90)
                for _ in range(num_requests)
            ]
            wait_for_requests(running, num_requests)
            assert not all(call.done() for call in waiting)
            running.process.send_signal(signal.SIGTERM)
            replies = [call.result() for call in waiting]
        assert [reply.status_code for reply in replies] == [200] * num_requests
        assert all(len(reply.json()) == MAX_ITEMS for reply in replies)
        running.process.wait(timeout=60)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/readyz")


def wait_for_requests(running: Running, num_requests: int) -> None:
    """Until, by BentoML's own metrics, that many are being answered or have been."""
    give_up_s = time.monotonic() + 20
    while time.monotonic() < give_up_s:
        arrived = 0.0
        for line in httpx.get(f"{running.url}/metrics", timeout=20).text.splitlines():
            if "/fill-mask" in line and ("_request_in_progress{" in line or "_total{" in line):
                arrived += float(line.split()[-1])
        if arrived >= num_requests:
            return
    pytest.fail("the requests did not arrive")
