"""Hugging Face's own client against the running service: its answers are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.albert_serve.support import Running

MASKED = "The [MASK] run was scored in the first inning."
TEXT = "An earned run is any run that was not enabled by a fielding error."
LONG = {"question": "What is an earned run?", "context": " ".join([TEXT] * 8)}


def call(service: Running, task: str, **arguments: Any) -> Any:
    """Call the method of a task."""
    return getattr(InferenceClient(f"{service.url}/{task}"), task.replace("-", "_"))(**arguments)


@pytest.fixture(scope="module")
def pipeline(checkpoint_dir: Path) -> Any:
    """What transformers answers to a text, by task."""
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
        ("text-classification", {"function_to_apply": None, "top_k": None}),
    ],
)
def test_answers_are_those_of_transformers(
    task: str, options: dict[str, Any], service: Running, pipeline: Any
) -> None:
    text = MASKED if task == "fill-mask" else TEXT
    defaults = {} if task == "fill-mask" else {"top_k": None}
    parameters = {name: value for name, value in options.items() if value is not None}
    expected = pipeline(task, text, **{**defaults, **parameters})
    result = call(service, task, text=text, **options)
    assert len(result) == len(expected)
    for one, other in zip(result, expected, strict=True):
        assert {name: one[name] for name in other} == {
            **other,
            "score": pytest.approx(other["score"], abs=1e-5),
        }


QUESTION_OPTIONS = {
    "align_to_words": True,
    "doc_stride": 4,
    "handle_impossible_answer": True,
    "max_answer_len": 5,
    "max_question_len": 6,
    "max_seq_len": 32,
    "top_k": 4,
}


@pytest.mark.parametrize(
    "options", [QUESTION_OPTIONS, dict.fromkeys(QUESTION_OPTIONS)], ids=["all", "nulls"]
)
def test_question_answering(service: Running, options: dict[str, Any]) -> None:
    result = call(service, "question-answering", **LONG, **options)
    answers = result if options["top_k"] else [result]
    assert 1 <= len(answers) <= 4
    for one in answers:
        assert LONG["context"][one.start : one.end] == one.answer
        assert 0 <= one.score <= 1


@pytest.mark.parametrize("normalize", [None, True])
def test_feature_extraction(service: Running, pipeline: Any, normalize: bool | None) -> None:
    """Texts have several lengths; the client makes one array of them."""
    texts = [TEXT, "It rained."]
    result = call(service, "feature-extraction", text=texts, normalize=normalize)
    expected = np.stack(
        [np.mean(pipeline("feature-extraction", text)[0], axis=0) for text in texts]
    )
    if normalize:
        expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    assert (result.dtype, result.shape) == (np.float32, (2, 64))
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)
    one = call(service, "feature-extraction", text=TEXT, normalize=normalize)
    np.testing.assert_allclose(one, expected[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("fill-mask", {"text": "no mask"}, r"The text has no \[MASK\]"),
        ("feature-extraction", {"text": "a", "prompt_name": "query"}, "prompt before the"),
        ("feature-extraction", {"text": "a", "dimensions": 8}, "Omit it"),
        ("feature-extraction", {"text": "a", "encoding_format": "float"}, "/v1/embeddings"),
    ],
)
def test_the_client_shows_our_errors(
    service: Running, task: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(HfHubHTTPError, match=message) as caught:
        call(service, task, **arguments)
    assert caught.value.response.status_code == 422
