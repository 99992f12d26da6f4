"""The methods of both clients against the running service, their options and their types."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, assert_type, get_overloads

import numpy as np
import pytest

from albert_serve.api.schemas import InfoReply, LabelScore, Order
from albert_serve.client import (
    AlbertClient,
    AnswerStream,
    AsyncAlbertClient,
    AsyncAnswerStream,
    requests,
)
from albert_serve.errors import ConfigError, InvalidInputError, NoMaskError, TextTooLongError
from scripts.unasync import generated
from tests.albert_serve.client.twins import CASES, Twin, assert_same, kinds
from tests.albert_serve.support import MAX_ITEMS, ROOT, Running

MakeTwin = Callable[..., Twin]


def test_the_defaults_are_those_of_the_documents() -> None:
    page = (ROOT / "docs/client.md").read_text(encoding="utf-8").partition("## Client options")[2]
    documented = dict(re.findall(r"^\| `(\w+)` \| `?([\w]+)`? \|", page, re.M))
    parameters = inspect.signature(AlbertClient).parameters.values()
    assert {one.name: f"{one.default}".removesuffix(".0") for one in parameters} == documented
    local = inspect.signature(AlbertClient.local).parameters["timeout_s"].default
    ready = inspect.signature(AlbertClient.wait_until_ready).parameters["timeout_s"].default
    assert (local, ready) == (24 * 60 * 60, 60)


@pytest.mark.parametrize("name", [*CASES, "zero_shot_classification"])
def test_a_docstring_lists_the_options_with_their_defaults(name: str) -> None:
    doc = inspect.getdoc(getattr(AlbertClient, name)) or ""
    entries = doc.partition("Keyword Args:\n    ")[2].partition("\n\n")[0].split("\n    ")
    text = " ".join(entry.strip() for entry in entries)
    documented = dict(re.findall(r"(\w+) \([^:]+\): .+?\(default: (.+?)\)\.(?= |$)", text))
    single, _ = get_overloads(getattr(AlbertClient, name))
    options = getattr(requests, single.__annotations__["options"][len("Unpack[") : -1])
    assert documented.keys() == options.__annotations__.keys()
    spec = getattr(requests, "ZERO_SHOT" if name.startswith("zero") else name.upper())
    parameters = spec.request.model_fields["parameters"].annotation
    for option, default in documented.items():
        value = parameters.model_fields[option].default
        if value is not None and option != "truncation":
            assert ast.literal_eval(default) == value


@pytest.mark.parametrize("name", CASES)
def test_an_input_a_list_and_a_stream_are_answered_alike(
    name: str, twin: MakeTwin, service_of: Callable[[str], Running]
) -> None:
    case = CASES[name]
    client = twin(service_of(case.task).url)
    answers = getattr(client, name)(case.rows, **case.options)
    assert kinds(answers) == {case.kind}
    streamed = client.stream(case.task, iter(case.rows), **case.options, **case.implied)
    assert_same(list(streamed), answers)
    alone = getattr(client, name)(case.rows[0], **case.options)
    assert_same(alone, answers[0])


def test_the_sync_client_is_generated_from_the_other() -> None:
    for path, content in generated().items():
        assert path.read_text(encoding="utf-8") == content, "run `make client`"


def test_info(albert: AlbertClient) -> None:
    info = albert.info()
    assert (info.mask_token, info.max_items) == ("[MASK]", MAX_ITEMS)
    assert {task.name for task in info.tasks} >= {"fill-mask", "question-answering"}
    assert str(info).startswith(f"{info.model_id}: an ALBERT in fp32, revision {info.revision}\n")


def test_a_refusal_raises_the_services_error_with_its_id(albert: AlbertClient) -> None:
    with pytest.raises(NoMaskError, match=r"\[MASK\]") as caught:
        albert.fill_mask("nothing")
    assert caught.value.request_id
    with pytest.raises(TextTooLongError, match="at most 128"):
        albert.text_classification("word " * 300)


def test_warnings_of_a_reply_are_logged(
    albert: AlbertClient, caplog: pytest.LogCaptureFixture
) -> None:
    in_second_part = [*["a film"] * MAX_ITEMS, "word " * 300]
    with caplog.at_level(logging.WARNING, "albert_serve.client.transport"):
        albert.fill_mask("a [MASK]", targets="supervolcanoes")
        albert.text_classification("word " * 300, truncation=True)
        albert.text_classification(in_second_part, truncation=True)
    first, second, third = caplog.messages
    assert "Its first piece" in first
    assert re.search(r": \d+ tokens were truncated\.$", second)
    assert re.search(r": \d+ tokens were truncated\.$", third)


def test_a_wrong_option_or_input_is_refused_before_sending() -> None:
    with AlbertClient("http://127.0.0.1:1") as client:
        with pytest.raises(InvalidInputError, match="Unknown field 'topk'"):
            client.fill_mask("a [MASK]", topk=3)  # type: ignore[call-overload]
        with pytest.raises(InvalidInputError, match=r"inputs\[1\].context is missing"):
            client.question_answering([{"question": "q", "context": "c"}, {"question": "q"}])
        with pytest.raises(InvalidInputError, match=r"^inputs"):
            client.coherence([])
        with pytest.raises(InvalidInputError, match=r"Unknown task 'fill_mask'\."):
            client.stream("fill_mask", ["a [MASK]"])


def test_an_async_client_is_of_one_event_loop(service: Running) -> None:
    albert = AsyncAlbertClient(service.url)

    async def ask() -> Any:
        return await albert.text_classification("a film")

    with asyncio.Runner() as first, asyncio.Runner() as second:
        assert first.run(ask())
        with pytest.raises(ConfigError, match="was used on another event loop"):
            second.run(ask())
        first.run(albert.aclose())


@pytest.mark.parametrize(
    "variables",
    [
        {"no_proxy": "localhost,127.0.0.1,[::1]"},
        {"ALL_PROXY": "socks5://127.0.0.1:9"},
        {"http_proxy": "127.0.0.1:9"},
    ],
)
def test_a_service_on_this_machine_needs_no_proxy(
    variables: dict[str, str], service: Running, twin: MakeTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert twin(service.url).info().tasks
    for url in ("http://localhost:1", "http://[::1]", "http://127.9.9.9"):
        assert twin(url)
    if "http_proxy" not in variables:
        for url in ("http://albert.example", "https://localhost", "http://10.0.0.1"):
            with pytest.raises(ConfigError, match=r"^The proxy variables .*trust_env"):
                twin(url)


def check_types(albert: AlbertClient, rows: Iterator[str]) -> None:
    """mypy checks these uses; nothing runs them."""
    assert_type(albert.text_classification("a film", top_k=1), list[LabelScore])
    assert_type(albert.text_classification(["a film", "another"]), list[list[LabelScore]])
    assert_type(albert.text_classification(np.array(["a film"])), list[list[LabelScore]])
    with albert.stream("text-classification", rows, truncation=True) as answers:
        assert_type(answers, AnswerStream)
    albert.text_classification(["a"], topk=1)  # type: ignore[call-overload]
    albert.sentence_order(["a"])  # type: ignore[type-var]
    assert albert.text_classification("a")[0].label.real  # type: ignore[attr-defined]


async def check_async_types(albert: AsyncAlbertClient, rows: AsyncIterator[list[str]]) -> None:
    assert_type(await albert.sentence_order({"text": "a", "text_pair": "b"}), Order)
    async with albert.stream("sentence-order", rows) as answers:
        assert_type(answers, AsyncAnswerStream)
    assert_type(await albert.info(), InfoReply)
