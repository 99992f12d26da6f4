"""Our clients and Hugging Face's client against the running service; examples and documents."""

from __future__ import annotations

import asyncio
import logging
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, assert_type

import httpx
import numpy as np
import pytest
import transformers
from huggingface_hub import InferenceClient

from albert_serve.api.schemas import LabelScore
from albert_serve.client import AlbertClient, AnswerStream, AsyncAlbertClient
from albert_serve.errors import ConfigError, InvalidInputError
from scripts.unasync import generated
from tests.albert_serve.client.support import CASES, MakeClient, assert_same, value_types
from tests.albert_serve.support import ROOT, RunningService


@pytest.mark.parametrize("name", CASES)
def test_one_input_a_list_and_a_stream_get_the_same_answers(
    name: str, make_client: MakeClient, service_of: Callable[[str], RunningService]
) -> None:
    case = CASES[name]
    client = make_client(service_of(case.task).url)
    method = getattr(client, name)
    answers = method(case.rows, **case.options)
    assert value_types(answers) == {case.value_type}
    streamed = client.stream(case.task, iter(case.rows), **case.options, **case.implied)
    assert_same(list(streamed), answers)
    for row, answer in zip(case.rows, answers, strict=True):
        assert_same(method(row, **case.options), answer)


def test_the_sync_client_is_generated_from_the_async_client() -> None:
    for path, content in generated().items():
        assert path.read_text(encoding="utf-8") == content, "run `make client`"


def test_warnings_of_a_reply_are_logged(
    albert: AlbertClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "albert_serve.client.transport"):
        albert.fill_mask("a [MASK]", targets="supervolcanoes")
        albert.text_classification("word " * 300, truncation=True)
    target_warning, truncation_warning = caplog.messages
    assert "Its first piece" in target_warning
    assert re.search(r": \d+ tokens were truncated\.$", truncation_warning)


def test_an_invalid_option_or_input_is_rejected_before_sending() -> None:
    with AlbertClient("http://127.0.0.1:1") as client:
        with pytest.raises(InvalidInputError, match="Unknown field 'topk'"):
            client.fill_mask("a [MASK]", topk=3)  # type: ignore[call-overload]
        with pytest.raises(InvalidInputError, match=r"inputs\[1\].context is missing"):
            client.question_answering([{"question": "q", "context": "c"}, {"question": "q"}])
        with pytest.raises(InvalidInputError, match=r"^inputs"):
            client.coherence([])
        with pytest.raises(InvalidInputError, match=r"Unknown task 'fill_mask'\."):
            client.stream("fill_mask", ["a [MASK]"])
        with pytest.raises(InvalidInputError, match="rows has the type str"):
            client.stream("fill-mask", "a [MASK]")


def test_an_async_client_works_on_one_event_loop_only(service: RunningService) -> None:
    albert = AsyncAlbertClient(service.url)
    with asyncio.Runner() as first_loop, asyncio.Runner() as second_loop:
        assert first_loop.run(albert.text_classification("a film"))
        with pytest.raises(ConfigError, match="was used on another event loop"):
            second_loop.run(albert.text_classification("a film"))
        first_loop.run(albert.aclose())


def check_types(albert: AlbertClient, rows: Iterator[str]) -> None:
    """Use methods for mypy to check. No test calls this function."""
    assert_type(albert.text_classification("a film", top_k=1), list[LabelScore])
    assert_type(albert.text_classification(["a film", "another"]), list[list[LabelScore]])
    assert_type(albert.text_classification(np.array(["a film"])), list[list[LabelScore]])
    with albert.stream("text-classification", rows, truncation=True) as answers:
        assert_type(answers, AnswerStream)
    albert.text_classification(["a"], topk=1)  # type: ignore[call-overload]
    albert.sentence_order(["a"])  # type: ignore[type-var]
    assert albert.text_classification("a")[0].label.real  # type: ignore[attr-defined]


EXAMPLES = ROOT / "examples"
SCRIPTS = [
    path.stem
    for path in sorted(EXAMPLES.glob("*.py"))
    if '__name__ == "__main__"' in path.read_text() and "from connection" in path.read_text()
]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/client.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_script_runs_on_a_local_model(
    script: str,
    bundle_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--local", str(bundle_dir)])
    monkeypatch.delitem(sys.modules, "connection", raising=False)
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    assert re.search(r"\d\.\d{2}", capsys.readouterr().out)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_documents_runs(
    program: str, service: RunningService, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(program.replace("http://127.0.0.1:3000", service.url), {})
    assert capsys.readouterr().out.strip()


MASKED = "The [MASK] run was scored in the first inning."
TEXT = "An earned run is any run that was not enabled by a fielding error."


def call_hf_client(service: RunningService, task: str, **arguments: Any) -> Any:
    """Call the method of a task of Hugging Face's client."""
    return getattr(InferenceClient(f"{service.url}/{task}"), task.replace("-", "_"))(**arguments)


@pytest.fixture(scope="module")
def pipeline(checkpoint_dir: Path) -> Any:
    """A function that returns the pipeline of transformers for a task."""
    make: Any = transformers.pipeline
    return cache(lambda task: make(task, model=str(checkpoint_dir), device="cpu"))


def test_hugging_faces_client_gets_the_answers_of_transformers(
    service: RunningService, pipeline: Any
) -> None:
    targets = ["▁run", "▁the", "supervolcanoes"]
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("fill-mask", MASKED, {"top_k": 40}),
        ("fill-mask", MASKED, {"targets": targets, "top_k": 1}),
        ("fill-mask", MASKED, {"targets": None, "top_k": None}),
        ("text-classification", TEXT, {"top_k": 1, "function_to_apply": "softmax"}),
        ("text-classification", TEXT, {"top_k": 2, "function_to_apply": "sigmoid"}),
    ]
    for task, text, options in cases:
        parameters = {name: value for name, value in options.items() if value is not None}
        expected = pipeline(task)(text, **parameters)
        result = call_hf_client(service, task, text=text, **options)
        for answer, hf_answer in zip(result, expected, strict=True):
            score = pytest.approx(hf_answer["score"], abs=1e-5)
            assert {name: answer[name] for name in hf_answer} == {**hf_answer, "score": score}


def test_hugging_faces_client_gets_answers_to_questions_and_entities(
    service_of: Callable[[str], RunningService],
) -> None:
    question = {"question": "What is an earned run?", "context": " ".join([TEXT] * 8)}
    text = {"text": "Anna Berg lives in Vienna. She came in 1932."}
    cases: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("question-answering", question, {"doc_stride": 4, "max_seq_len": 32, "top_k": 4}),
        ("question-answering", question, {"max_answer_len": 5, "top_k": 4}),
        ("token-classification", text, {"aggregation_strategy": "none", "stride": 4}),
        ("token-classification", text, {"aggregation_strategy": "average"}),
    ]
    for task, item, options in cases:
        service = service_of(task)
        body = {"inputs": item.get("text", item), "parameters": options}
        expected = httpx.post(f"{service.url}/{task}", json=body, timeout=30).json()
        answers = call_hf_client(service, task, **item, **options)
        assert len(expected) > 1
        assert_same([{name: answer[name] for name in expected[0]} for answer in answers], expected)


def test_hugging_faces_client_gets_one_array_of_embeddings(
    service: RunningService, pipeline: Any
) -> None:
    """The texts have different lengths."""
    texts, embed = [TEXT, "It rained."], pipeline("feature-extraction")
    means = np.stack([np.mean(embed(text)[0], axis=0) for text in texts])
    norms = np.linalg.norm(means, axis=-1, keepdims=True)
    for normalize, expected in ((None, means), (True, means / norms)):
        result = call_hf_client(service, "feature-extraction", text=texts, normalize=normalize)
        assert (result.dtype, result.shape) == (np.float32, (2, 64))
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)
        single = call_hf_client(service, "feature-extraction", text=TEXT, normalize=normalize)
        np.testing.assert_allclose(single, expected[0], rtol=0, atol=1e-4)
