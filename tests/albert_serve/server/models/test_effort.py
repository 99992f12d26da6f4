"""What is read on the event loop, in a thread, and in the thread of large requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from albert_serve.api.schemas import (
    FillMaskParameters,
    FillMaskRequest,
    MultipleChoiceRequest,
    QuestionAnsweringRequest,
    SentenceOrderRequest,
    TaskRequest,
)
from albert_serve.server.models.effort import effort_of, effort_of_answer
from albert_serve.server.process.threads import Effort
from albert_serve.tasks.base import EncoderInput, Prepared

INPUT = EncoderInput(ids=[2, 3], types=[0, 0], task="question-answering", rows=None)


def reads_much(request_type: type[TaskRequest], inputs: Any, **parameters: Any) -> bool:
    body = {"inputs": inputs, "parameters": parameters}
    return effort_of(request_type.model_validate(body)) is Effort.LARGE


def test_a_request_effort_of_by_the_characters_of_all_its_texts() -> None:
    assert not reads_much(FillMaskRequest, "abc" * 1000)
    assert reads_much(FillMaskRequest, "abc" * 10_000)
    assert reads_much(FillMaskRequest, "abc", targets=["xyz" * 10] * 500)
    assert reads_much(QuestionAnsweringRequest, {"question": "ab", "context": "cde" * 10_000})


@pytest.mark.parametrize("parameters", [{}, {"max_seq_len": 16}, {"doc_stride": 1}])
def test_short_questions_are_small_but_where_they_have_many_windows(
    parameters: dict[str, Any],
) -> None:
    inputs = {"question": "Who ran?", "context": "A man ran home."}
    asked = QuestionAnsweringRequest.model_validate({"inputs": inputs, "parameters": parameters})
    assert effort_of(asked) is (Effort.MEDIUM if parameters else Effort.SMALL)


def test_blanks_are_read_with_each_choice() -> None:
    inputs = {"question": "_ " * 90, "choices": ["a" * 180, "b" * 180], "context": "c"}
    asked = MultipleChoiceRequest.model_validate({"inputs": inputs})
    assert effort_of(asked) is Effort.LARGE


@pytest.mark.parametrize(
    ("parts", "effort"),
    [
        ({}, Effort.SMALL),
        ({"num_label_scores": 1000}, Effort.MEDIUM),
        ({"num_label_scores": 5000}, Effort.LARGE),
        ({"num_wide_rows": 20}, Effort.LARGE),
        ({"inputs": [INPUT] * 20}, Effort.MEDIUM),
    ],
)
def test_an_answer_is_small_by_all_that_it_is_made_of(
    parts: dict[str, Any], effort: Effort
) -> None:
    item = Prepared(**{"inputs": [], "finish": list, **parts})
    assert effort_of_answer([item]) is effort


def test_a_character_counts_as_those_that_it_stands_for() -> None:
    assert not reads_much(FillMaskRequest, "\u4e2d" * 2000)
    assert reads_much(FillMaskRequest, "\ufdfa" * 2000)
    assert reads_much(QuestionAnsweringRequest, {"question": "ab", "context": "\ufdfa" * 2000})
    asked = {"context": "a", "question": "\ufdfa" * 20, "choices": ["b"] * 50}
    assert reads_much(MultipleChoiceRequest, asked)


def test_a_request_effort_of_by_its_texts_and_the_pairs_of_its_sentences() -> None:
    assert not reads_much(FillMaskRequest, ["a"] * 100)
    assert reads_much(FillMaskRequest, ["a"] * 500)
    sentences = {"sentences": ["a"] * 32}
    assert not reads_much(SentenceOrderRequest, sentences)
    assert reads_much(SentenceOrderRequest, sentences, reorder=True)


def test_a_large_request_is_not_read_to_its_end() -> None:
    read: list[str] = []

    class Texts(list[str]):
        def __iter__(self) -> Iterator[str]:
            for text in super().__iter__():
                read.append(text)
                yield text

    request = FillMaskRequest.model_construct(
        inputs=Texts(["a [MASK]"] * 36_000), parameters=FillMaskParameters()
    )
    assert effort_of(request)
    assert len(read) < 1000
