"""Hugging Face's own clients against the running service, with every parameter that they have.

What they get is compared with what `transformers` itself gives for the same checkpoint.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.albert_serve.support import Running

MASKED = "The [MASK] run was scored in the first inning."
TEXT = "An earned run is any run that was not enabled by a fielding error."
LONG = {"question": "What is an earned run?", "context": " ".join([TEXT] * 8)}

# Calls a method of the client of a task: (task, method, arguments).
Call = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, service: Running) -> Call:
    def run(task: str, **arguments: Any) -> Any:
        name = task.replace("-", "_")
        return getattr(InferenceClient(f"{service.url}/{task}"), name)(**arguments)

    def run_async(task: str, **arguments: Any) -> Any:
        async def send() -> Any:
            async with AsyncInferenceClient(f"{service.url}/{task}") as client:
                return await getattr(client, task.replace("-", "_"))(**arguments)

        return asyncio.run(send())

    return run if request.param == "sync" else run_async


@pytest.fixture(scope="module")
def pipeline(checkpoint_dir: Path) -> Any:
    """What transformers answers to a text, by task."""
    make: Any = transformers.pipeline
    tasks = ("fill-mask", "text-classification", "feature-extraction")
    pipelines = {task: make(task, model=str(checkpoint_dir), device="cpu") for task in tasks}
    return lambda task, text, **options: pipelines[task](text, **options)


def options_of(method: Callable[..., Any]) -> set[str]:
    """The keyword arguments of a client's method, other than the model's address."""
    parameters = inspect.signature(method).parameters.values()
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} - {"model"}


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
    task: str, options: dict[str, Any], call: Call, pipeline: Any
) -> None:
    text = MASKED if task == "fill-mask" else TEXT
    defaults = {} if task == "fill-mask" else {"top_k": None}
    parameters = {name: value for name, value in options.items() if value is not None}
    expected = pipeline(task, text, **{**defaults, **parameters})
    result = call(task, text=text, **options)
    assert len(result) == len(expected)
    for one, other in zip(result, expected, strict=True):
        assert {name: one[name] for name in other} == {
            **other,
            "score": pytest.approx(other["score"], abs=1e-5),
        }


def test_fill_mask_of_several_masks(call: Call, pipeline: Any) -> None:
    text = "The [MASK] run was [MASK]."
    result = call("fill-mask", text=text, top_k=3)
    expected = pipeline("fill-mask", text, top_k=3)
    # The client makes objects of the outermost list's elements only.
    assert [[one["token"] for one in tokens] for tokens in result] == [
        [one["token"] for one in tokens] for tokens in expected
    ]


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
    "options",
    [
        pytest.param({"align_to_words": False, "top_k": 2, "max_question_len": 2}, id="tokens"),
        pytest.param({"max_answer_len": 1}, id="short"),
        pytest.param(dict.fromkeys(QUESTION_OPTIONS), id="nulls"),
        pytest.param(QUESTION_OPTIONS, id="all"),
    ],
)
def test_question_answering(call: Call, options: dict[str, Any]) -> None:
    result = call("question-answering", **LONG, **options)
    top_k = options.get("top_k") or 1
    if top_k == 1:
        result = [result]
    assert 1 <= len(result) <= top_k
    for one in result:
        assert LONG["context"][one.start : one.end] == one.answer
        assert 0 <= one.score <= 1
    if options.get("max_answer_len") == 1:
        assert " " not in result[0].answer


@pytest.mark.parametrize("normalize", [None, True])
def test_feature_extraction(call: Call, pipeline: Any, normalize: bool | None) -> None:
    """Texts have several lengths; the client makes one array of them."""
    texts = [TEXT, "It rained."]
    result = call("feature-extraction", text=texts, normalize=normalize)
    expected = np.stack(
        [np.mean(pipeline("feature-extraction", text)[0], axis=0) for text in texts]
    )
    if normalize:
        expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    assert (result.dtype, result.shape) == (np.float32, (2, 64))
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)
    one = call("feature-extraction", text=TEXT, normalize=normalize)
    np.testing.assert_allclose(one, expected[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [InferenceClient, AsyncInferenceClient])
def test_every_option_of_the_clients_is_tried_here(kind: Any) -> None:
    """A new version of the client that has more of them has to be looked at."""
    assert options_of(kind.fill_mask) == {"targets", "top_k"}
    assert options_of(kind.text_classification) == {"function_to_apply", "top_k"}
    assert options_of(kind.question_answering) == set(QUESTION_OPTIONS)
    assert options_of(kind.feature_extraction) == {
        "normalize",
        "truncate",
        "truncation_direction",
        *("prompt_name", "dimensions", "encoding_format"),  # refused, see below
    }


def test_health_and_info_are_where_the_client_looks(service: Running) -> None:
    described = InferenceClient(service.url, provider="hf-inference")
    assert described.health_check() is True
    assert described.get_endpoint_info()["max_positions"] == 128


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("fill-mask", {"text": "no mask"}, r"the text has no \[MASK\]"),
        ("feature-extraction", {"text": "word " * 300, "truncate": False}, "at most 128"),
        ("feature-extraction", {"text": "a", "prompt_name": "query"}, "prompt before the"),
        ("feature-extraction", {"text": "a", "dimensions": 8}, "leave it out"),
        ("feature-extraction", {"text": "a", "encoding_format": "float"}, "/v1/embeddings"),
    ],
)
def test_the_client_shows_our_errors(
    call: Call, task: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(HfHubHTTPError, match=message) as caught:
        call(task, **arguments)
    assert caught.value.response.status_code == 422
