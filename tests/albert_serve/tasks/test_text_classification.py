"""Text classification against `transformers`' pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from albert_serve.api.schemas import (
    LabelScore,
    ProblemType,
    ScoreFunction,
    TextClassificationParameters,
    TextInput,
)
from albert_serve.bundle.manifest import AdaptiveDepth, ClassifierEntry
from albert_serve.errors import InvalidInputError
from albert_serve.tasks import TaskSetup, TextClassification
from albert_serve.tasks.base import Logits
from albert_serve.tasks.probability import sigmoid, softmax
from tests.albert_serve.task_fixtures import Answerer

DEFAULT = TextClassificationParameters()


@pytest.fixture(scope="module")
def oracle(checkpoint_dir: Path) -> Any:
    pipeline: Any = transformers.pipeline(
        "text-classification", model=str(checkpoint_dir), device="cpu"
    )
    # transformers 5 leaves the types of a pair out unless told; ALBERT was trained with them.
    pipeline.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return pipeline


@pytest.fixture(scope="module")
def task(task_setup: TaskSetup) -> TextClassification:
    return TextClassification(task_setup)


def with_entry(setup: TaskSetup, **changes: Any) -> TextClassification:
    assert setup.entry is not None
    return TextClassification(replace(setup, entry=setup.entry.model_copy(update=changes)))


def finish(task: TextClassification, logits: Sequence[float]) -> list[LabelScore]:
    result = task.prepare("a", DEFAULT).finish([np.array([logits], np.float32)])
    assert isinstance(result, list)
    return result


def assert_same_labels(result: list[LabelScore], expected: list[dict[str, Any]]) -> None:
    assert [item.label for item in result] == [item["label"] for item in expected]
    scores = [item.score for item in result]
    np.testing.assert_allclose(scores, [item["score"] for item in expected], atol=1e-5)


def test_texts_equal_the_pipeline(
    task: TextClassification, answer: Answerer, oracle: Any, sentences: list[str]
) -> None:
    for text in [*sentences, ""]:
        assert_same_labels(answer(task.prepare(text, DEFAULT)), oracle(text, top_k=None))


@pytest.mark.parametrize("function", get_args(ScoreFunction))
def test_every_function_equals_the_pipeline(
    function: ScoreFunction, task: TextClassification, answer: Answerer, oracle: Any
) -> None:
    parameters = TextClassificationParameters(function_to_apply=function)
    result = answer(task.prepare("It was a film.", parameters))
    expected = oracle("It was a film.", top_k=None, function_to_apply=function)
    assert_same_labels(result, expected)


def test_a_pair_equals_the_pipeline(
    task: TextClassification, answer: Answerer, oracle: Any
) -> None:
    pair = {"text": "A dog runs.", "text_pair": "An animal moves."}
    result = answer(task.prepare(TextInput.model_validate(pair), DEFAULT))
    assert_same_labels(result, oracle(pair, top_k=None))


@pytest.mark.parametrize("top_k", [None, 1, 2, 5])
def test_every_top_k_equals_the_pipeline(
    top_k: int | None, task: TextClassification, answer: Answerer, oracle: Any, sentences: list[str]
) -> None:
    parameters = TextClassificationParameters(top_k=top_k)
    expected = oracle(sentences[:3], top_k=top_k)
    for text, labels in zip(sentences[:3], expected, strict=True):
        result = answer(task.prepare(text, parameters))
        assert_same_labels(result, [labels] if isinstance(labels, dict) else labels)


@pytest.mark.parametrize(
    "problem_type",
    ["regression", "single_label_classification", "multi_label_classification"],
)
def test_the_problem_type_decides_as_in_the_pipeline(
    problem_type: ProblemType,
    checkpoint_dir: Path,
    tmp_path: Path,
    task_setup: TaskSetup,
    answer: Answerer,
) -> None:
    folder = tmp_path / "typed"
    shutil.copytree(checkpoint_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "problem_type": problem_type}))
    pipeline = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    task = with_entry(task_setup, problem_type=problem_type)
    result = answer(task.prepare("It was a film.", DEFAULT))
    assert_same_labels(result, pipeline("It was a film.", top_k=None))


@pytest.mark.parametrize(
    ("problem_type", "labels", "expected"),
    [
        pytest.param("regression", ["score"], [-2.5], id="regression"),
        pytest.param(None, ["score"], [0.0758582], id="one label"),
        pytest.param("multi_label_classification", ["a", "b"], [0.0758582] * 2, id="multi-label"),
        pytest.param("single_label_classification", ["a", "b"], [0.5] * 2, id="single-label"),
        pytest.param(None, ["a", "b"], [0.5] * 2, id="two labels"),
    ],
)
def test_the_problem_type_decides_the_function(
    problem_type: ProblemType | None,
    labels: list[str],
    expected: list[float],
    task_setup: TaskSetup,
) -> None:
    task = with_entry(task_setup, problem_type=problem_type, labels=labels, num_outputs=len(labels))
    result = finish(task, [-2.5] * len(labels))
    assert [item.score for item in result] == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_probabilities_are_probabilities(values: list[float]) -> None:
    logits: Logits = np.array(values, np.float32)
    assert softmax(logits).sum() == pytest.approx(1.0)
    each = sigmoid(logits)
    assert ((each >= 0) & (each <= 1)).all()
    assert (np.diff(each[np.argsort(logits)]) >= 0).all()


@pytest.mark.parametrize(
    ("num_first", "num_second"),
    [(200, None), (200, 3), (3, 200), (100, 101), (101, 100), (100, 100), (63, 90), (62, 70)],
)
def test_truncation_is_that_of_transformers(
    num_first: int, num_second: int | None, task: TextClassification, oracle: Any
) -> None:
    first, second = "e " * num_first, None if num_second is None else "a " * num_second
    parameters = TextClassificationParameters(truncation="truncate")
    prepared = task.prepare(TextInput(text=first, text_pair=second), parameters)
    expected = oracle.tokenizer(first, second, truncation=True, max_length=128)
    assert prepared.inputs[0].ids == expected["input_ids"]
    assert prepared.inputs[0].types == expected["token_type_ids"]
    whole = oracle.tokenizer(first, second)
    assert prepared.num_truncated == len(whole["input_ids"]) - 128


def test_a_further_head_takes_all_layers(task_setup: TaskSetup) -> None:
    topic = ClassifierEntry(graph="topic.onnx", num_outputs=2)
    task = with_entry(
        task_setup, adaptive_depth=AdaptiveDepth(max_layers=3), heads={"topic": topic}
    )
    task.prepare("a", TextClassificationParameters(max_layers=1))
    [encoded] = task.prepare("a", TextClassificationParameters(head="topic")).inputs
    assert (encoded.task, encoded.early_exit) == ("text-classification/topic", None)
    with pytest.raises(InvalidInputError, match="of their default head; this one answers after"):
        task.prepare("a", TextClassificationParameters(head="topic", max_layers=1))
