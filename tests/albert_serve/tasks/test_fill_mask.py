"""Fill-mask against `transformers`' pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from albert_serve.api.schemas import FilledToken, FillMaskParameters
from albert_serve.tasks import FillMask, TaskSetup
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.task_fixtures import Answerer

DEFAULT = FillMaskParameters()


@pytest.fixture(scope="module")
def oracle(checkpoint_dir: Path) -> Any:
    return transformers.pipeline("fill-mask", model=str(checkpoint_dir), device="cpu")


@pytest.fixture(scope="module")
def task(task_setup: TaskSetup) -> FillMask:
    return FillMask(task_setup)


def assert_same_tokens(result: list[FilledToken], expected: list[dict[str, Any]]) -> None:
    assert [item.model_dump(exclude={"score"}) for item in result] == [
        {name: value for name, value in item.items() if name != "score"} for item in expected
    ]
    scores = [item.score for item in result]
    np.testing.assert_allclose(scores, [item["score"] for item in expected], atol=1e-5)


def test_one_mask_equals_the_pipeline(
    task: FillMask, answer: Answerer, oracle: Any, sentences: list[str]
) -> None:
    for sentence in sentences:
        words = sentence.split()
        text = " ".join([*words[:3], "[MASK]", *words[4:]])
        assert_same_tokens(answer(task.prepare(text, DEFAULT)), oracle(text))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[MASK]", id="alone"),
        pytest.param("Café über [MASK].", id="accents"),
        pytest.param("a<pad> [MASK] b", id="pad in the text"),
        pytest.param("  spaces   before [MASK]  and after ", id="spaces"),
        pytest.param("[CLS] odd [SEP] [MASK]", id="special tokens in the text"),
        pytest.param("😀 東京 [MASK]", id="unknown characters"),
    ],
)
def test_odd_texts_equal_the_pipeline(
    text: str, task: FillMask, answer: Answerer, oracle: Any
) -> None:
    parameters = FillMaskParameters(top_k=3)
    assert_same_tokens(answer(task.prepare(text, parameters)), oracle(text, top_k=3))


def test_rows_of_the_embedding_without_a_token_are_no_answers(
    task: FillMask, tokenizer: AlbertTokenizer
) -> None:
    size = tokenizer.vocab_size
    prepared = task.prepare("a [MASK] b", FillMaskParameters(top_k=2))
    logits = np.zeros((1, size + 8), np.float32)
    logits[0, [7, size - 1, size, size + 7]] = [5, 6, 9, 9]
    answer: Any = prepared.finish([logits])
    assert [filled.token for filled in answer] == [size - 1, 7]


def test_each_mask_of_several_has_a_list(task: FillMask, answer: Answerer, oracle: Any) -> None:
    text = "The [MASK] of the [MASK] was [MASK]."
    result = answer(task.prepare(text, FillMaskParameters(top_k=4)))
    expected = oracle(text, top_k=4)
    assert len(result) == 3
    for tokens, expected_tokens in zip(result, expected, strict=True):
        assert_same_tokens(tokens, expected_tokens)


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param("▁the", id="one"),
        pytest.param(["▁of", "▁the", "▁of"], id="twice the same"),
        pytest.param(["e", "supervolcanoes"], id="by its first piece"),
        pytest.param(["☃", "▁the", "", "東京", "Café"], id="unknown, empty, to be normalised"),
        pytest.param(["[MASK]", "▁", "<unk>"], id="special"),
    ],
)
def test_targets_equal_the_pipeline(
    targets: str | list[str], task: FillMask, answer: Answerer, oracle: Any
) -> None:
    parameters = FillMaskParameters(targets=targets)
    text = "One [MASK] and no more."
    assert_same_tokens(answer(task.prepare(text, parameters)), oracle(text, targets=targets))


def test_a_target_that_is_not_in_the_vocabulary_gives_a_warning(
    task: FillMask, tokenizer: AlbertTokenizer
) -> None:
    first = tokenizer.token(tokenizer.encode_plain("supervolcanoes").ids[0])
    targets = ["▁the", "supervolcanoes", "☃", " "]
    long, unknown, empty = task.prepare("a [MASK]", FillMaskParameters(targets=targets)).warnings
    assert "'supervolcanoes' is not in the vocabulary" in long
    assert long.endswith(f"its first piece {first!r} was scored")
    assert unknown.endswith("its first piece '▁' was scored, which says nothing of it")
    assert empty.startswith("the target ' ' is not in the vocabulary and stands for nothing")


def test_warnings_of_many_long_targets_fit_a_header(task: FillMask) -> None:
    targets = [f"the{number:x<125}" for number in range(512)]  # as many characters as are taken
    warnings = task.prepare("a [MASK]", FillMaskParameters(targets=targets)).warnings
    assert warnings[-1] == "and so for 492 further targets"
    assert sum(map(len, warnings)) < 4000


@pytest.mark.parametrize("text", ["a [MASK]", "a [MASK] b [MASK]"])
def test_the_whole_vocabulary_equals_the_pipeline(
    text: str, task: FillMask, answer: Answerer, oracle: Any
) -> None:
    result = answer(task.prepare(text, FillMaskParameters(top_k=1000)))
    expected = oracle(text, top_k=1000)
    if isinstance(result[0], FilledToken):
        result, expected = [result], [expected]
    for tokens, expected_tokens in zip(result, expected, strict=True):
        # Scores that differ by less than rounding may change places.
        assert_same_tokens(
            sorted(tokens, key=lambda one: one.token),
            sorted(expected_tokens, key=lambda one: one["token"]),
        )
        assert sum(one.score for one in tokens) == pytest.approx(1.0)
