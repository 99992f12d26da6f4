"""Text classification against `transformers`' pipeline."""

from __future__ import annotations

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
from albert_serve.tasks import TaskSetup, TextClassification
from albert_serve.tasks.base import Logits, sigmoid, softmax
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
    head = setup.head.model_copy(update=changes)
    return TextClassification(replace(setup, heads={"text-classification": head}))


def finish(task: TextClassification, logits: Sequence[float]) -> list[LabelScore]:
    result = task.prepare("a", DEFAULT).finish([np.array([logits], np.float32)])
    assert isinstance(result, list)
    return result


@pytest.mark.parametrize(
    "parameters",
    [{}, *({"function_to_apply": each} for each in get_args(ScoreFunction)), {"top_k": 1}],
)
def test_answers_equal_the_pipeline(
    parameters: dict[str, Any],
    task: TextClassification,
    answer: Answerer,
    oracle: Any,
    sentences: list[str],
) -> None:
    pair = {"text": "A dog runs.", "text_pair": "An animal moves."}
    items: list[Any] = [*sentences[:4], pair]
    for item in items:
        texts = TextInput.model_validate(item) if isinstance(item, dict) else item
        result = answer(task.prepare(texts, TextClassificationParameters(**parameters)))
        expected = oracle(item, **{"top_k": None, **parameters})
        assert [each.label for each in result] == [each["label"] for each in expected]
        scores = [each.score for each in result]
        np.testing.assert_allclose(scores, [each["score"] for each in expected], atol=1e-5)


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
