"""Our clients and Hugging Face's client against the running service; examples and documents."""

from __future__ import annotations

import asyncio
import logging
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
import transformers
from huggingface_hub import InferenceClient

from albert_serve.api.schemas import LabelScore
from albert_serve.client import AlbertClient, AnswerStream, AsyncAlbertClient
from albert_serve.errors import ConfigError, InvalidInputError, NoMaskError, TextTooLongError
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
    assert_same(method(case.rows[0], **case.options), answers[0])


def test_the_sync_client_is_generated_from_the_async_client() -> None:
    for path, content in generated().items():
        assert path.read_text(encoding="utf-8") == content, "run `make client`"


def test_an_error_reply_raises_the_services_error_with_the_request_id(albert: AlbertClient) -> None:
    with pytest.raises(NoMaskError, match=r"\[MASK\]") as caught:
        albert.fill_mask("nothing")
    assert caught.value.request_id
    with pytest.raises(TextTooLongError, match="at most 128"):
        albert.text_classification("word " * 300)


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


def test_an_async_client_works_on_one_event_loop_only(service: RunningService) -> None:
    albert = AsyncAlbertClient(service.url)

    async def classify() -> Any:
        return await albert.text_classification("a film")

    with asyncio.Runner() as first_loop, asyncio.Runner() as second_loop:
        assert first_loop.run(classify())
        with pytest.raises(ConfigError, match="was used on another event loop"):
            second_loop.run(classify())
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
    """The pipelines of transformers, called with a task and a text."""
    make: Any = transformers.pipeline
    tasks = ("fill-mask", "text-classification", "feature-extraction")
    pipelines = {task: make(task, model=str(checkpoint_dir), device="cpu") for task in tasks}
    return lambda task, text, **options: pipelines[task](text, **options)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("fill-mask", {"top_k": 40}),
        ("fill-mask", {"targets": ["▁run", "▁the", "supervolcanoes"], "top_k": 1}),
        ("fill-mask", {"targets": None, "top_k": None}),
        ("text-classification", {"top_k": 1, "function_to_apply": "softmax"}),
        ("text-classification", {"top_k": 2, "function_to_apply": "sigmoid"}),
    ],
)
def test_hugging_faces_client_gets_the_answers_of_transformers(
    task: str, options: dict[str, Any], service: RunningService, pipeline: Any
) -> None:
    text = MASKED if task == "fill-mask" else TEXT
    defaults = {} if task == "fill-mask" else {"top_k": None}
    parameters = {name: value for name, value in options.items() if value is not None}
    expected = pipeline(task, text, **{**defaults, **parameters})
    result = call_hf_client(service, task, text=text, **options)
    for answer, hf_answer in zip(result, expected, strict=True):
        score = pytest.approx(hf_answer["score"], abs=1e-5)
        assert {name: answer[name] for name in hf_answer} == {**hf_answer, "score": score}


def test_hugging_faces_client_gets_answers_to_questions(
    service: RunningService, albert: AlbertClient
) -> None:
    item = {"question": "What is an earned run?", "context": " ".join([TEXT] * 8)}
    options: Any = {"doc_stride": 4, "max_answer_len": 5, "max_seq_len": 32, "top_k": 4}
    answers = call_hf_client(service, "question-answering", **item, **options)
    expected: Any = albert.question_answering(item, **options)
    spans = [(answer.start, answer.end, answer.answer) for answer in expected]
    assert len(spans) > 1
    assert [(answer.start, answer.end, answer.answer) for answer in answers] == spans


@pytest.mark.parametrize("normalize", [None, True])
def test_hugging_faces_client_gets_one_array_of_embeddings(
    service: RunningService, pipeline: Any, normalize: bool | None
) -> None:
    """The texts have different lengths."""
    texts = [TEXT, "It rained."]
    result = call_hf_client(service, "feature-extraction", text=texts, normalize=normalize)
    expected = np.stack(
        [np.mean(pipeline("feature-extraction", text)[0], axis=0) for text in texts]
    )
    if normalize:
        expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    assert (result.dtype, result.shape) == (np.float32, (2, 64))
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)
    single = call_hf_client(service, "feature-extraction", text=TEXT, normalize=normalize)
    np.testing.assert_allclose(single, expected[0], rtol=0, atol=1e-4)
