"""BentoML's own ways to call the service: its clients, and services that depend on ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import bentoml
import httpx
import pytest
from bentoml.exceptions import UnprocessableEntity

from albert_serve.api.schemas import Answer, FilledToken, InfoReply
from albert_serve.server.openapi import EXAMPLES
from tests.albert_serve.server.replies import MASKED, VALID, assert_close
from tests.albert_serve.support import ROOT, Running, running_service, service_environment

# BentoML's own, and those of what it imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KEY = "a-key-between-services"
COMPOSED = "tests.albert_serve.server.bentoml.composed:Composed"


@contextmanager
def calling(url: str) -> Iterator[Any]:
    with bentoml.SyncHTTPClient(url) as client:
        yield client
        client._temp_dir.cleanup()  # else it is the interpreter that does it, with a warning


@pytest.fixture(scope="module")
def native(service: Running) -> Iterator[Any]:
    with calling(service.url) as client:
        yield client


def method(task: str) -> str:
    return task.replace("-", "_")


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


def test_calls_in_process_take_and_return_values_and_raise_bentomls_exceptions(
    bundle_dir: Path, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a service that depends on ours in this process: BentoML calls none of our hooks."""
    monkeypatch.setenv("ALBERT_SERVE_BUNDLE", str(bundle_dir))
    from tests.albert_serve.server.bentoml.composed import Composed

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
