"""Spans that recur in a passage become questions whose answer stands where they say."""

from __future__ import annotations

import numpy as np
import pytest

from recipes.albert_small_en.recurring import (
    MARKER,
    STOP_WORDS,
    Occurrence,
    passages,
    recurring_spans,
    span_questions,
)
from tests.training.support import WIKI
from training.data.corpus import read_documents, split_sentences
from training.data.questions import Question, locate_answers

SENTENCES = [
    "The Royal Navy of Norway built ships in Bergen.",
    "Its ships were old, the royal navy of Norway said.",
    "In the city the Royal Navy, Norway and the others met.",
    "It rained in the city.",
]


def texts(sentences: list[str], spans: list[list[Occurrence]]) -> list[list[str]]:
    return [[sentences[at][begin:end] for at, begin, end in span] for span in spans]


def questions(sentences: list[str], seed: int = 0) -> list[Question]:
    return list(span_questions(sentences, np.random.default_rng(seed), "p"))


def test_the_longest_spans_of_each_place_are_found() -> None:
    """Not "Royal Navy" within the longer one, nor spans of stop words or over a comma."""
    found = texts(SENTENCES, recurring_spans(SENTENCES))
    assert found == [["Royal Navy of Norway", "royal navy of Norway"]]
    others = texts(SENTENCES, recurring_spans(SENTENCES, {*STOP_WORDS, "norway"}))
    assert others == [["Royal Navy", "royal navy", "Royal Navy"]]


def test_the_other_sentences_are_the_context_with_one_answer() -> None:
    sentences = [
        "The old harbour was built by monks.",
        "Near the old harbour and the old harbour wall stands a church.",
        "Ships left the old harbour in spring.",
    ]
    for seed in range(20):
        (question,) = questions(sentences, seed=seed)
        assert question.answers == ("old harbour",)
        assert question.start is not None
        stop = question.start + len("old harbour")
        assert question.context[question.start : stop] == "old harbour"
        assert question.context.count("old harbour") == 1
        assert "old harbour" not in question.question
        assert MARKER in question.question
        whole = f"{question.question} {question.context}"
        assert whole.count(MARKER) == 3
        restored = whole.replace(MARKER, "old harbour")
        assert sorted(restored) == sorted(" ".join(sentences))


def test_questions_are_bounded() -> None:
    """Two of three spans of a passage; sentences of too few or too many words ask nothing."""
    sentences = [f"Blue lake {n} and green hill {n} met red rock {n} here." for n in range(4)]
    assert len(recurring_spans(sentences)) == 3
    assert len(questions(sentences)) == 2
    assert not questions(["Blue lake here.", "We saw blue lake."])
    assert not questions([f"{'word ' * 40} blue lake.", f"{'other ' * 40} blue lake."])


@pytest.fixture(scope="module")
def real() -> list[Question]:
    made: list[Question] = []
    for number, document in enumerate(read_documents([WIKI])):
        for index, passage in enumerate(passages(split_sentences(document), 200)):
            rng = np.random.default_rng([0, number, index])
            made += span_questions(passage, rng, f"{number}-{index}")
    return made


def test_real_text_has_questions_with_answers_at_their_place(real: list[Question]) -> None:
    assert len(real) > 30
    located, num_repaired = locate_answers(real)
    assert num_repaired == 0
    assert len({question.id for question in located}) == len(real)
    for question in real:
        (answer,) = question.answers
        assert 2 <= len(answer.split()) <= 10
        assert MARKER in question.question
        assert answer.lower() not in question.question.lower()
        words = answer.lower().split()
        assert {words[0], words[-1]}.isdisjoint(STOP_WORDS)
