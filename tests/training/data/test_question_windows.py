"""The span that a window is trained on is the answer's text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import SQUAD
from training.data.corpus import CorpusError
from training.data.questions import Question, SpanExample, read_squad, span_examples

QUESTIONS = read_squad([SQUAD])
LONG = Question(
    id="long",
    question="Who?",
    context="the school " * 300 + "Erdős " + "of the tor " * 50,
    answers=("Erdős",),
    start=11 * 300,
)


def windows(
    question: Question, tokenizer: AlbertTokenizer, length: int, stride: int = 128
) -> list[SpanExample]:
    return list(span_examples(question, tokenizer, length=length, stride=stride))


def squeezed(text: str) -> str:
    """As the vocabulary has it: without case, accents and white space."""
    return "".join(text.lower().split()).replace("ł", "<unk>").replace("é", "e")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
@pytest.mark.parametrize("length", [128, 256, 512])
def test_the_span_decodes_to_the_answer(
    question: Question, tokenizer: AlbertTokenizer, length: int
) -> None:
    """Tokens are whole, so that a span may have a little more at its ends than the answer."""
    num_answers = 0
    for window in windows(question, tokenizer, length):
        assert len(window.ids) <= length
        if window.start:
            num_answers += 1
            ids = window.ids[window.start : window.end + 1]
            text = squeezed(tokenizer.decode(ids, keep_special=True))
            answer = squeezed(question.answers[0])
            assert answer in text
            # A word that begins with a lone "▁" begins with it in both texts.
            inner = ids[2:] if tokenizer.token(ids[0]) == "▁" else ids[1:]
            for part in (inner, ids[:-1]):
                assert answer not in squeezed(tokenizer.decode(part, keep_special=True))
    assert num_answers >= 1


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([*QUESTIONS, LONG]), st.integers(12, 600), st.integers(1, 200))
def test_windows_cover_the_context_without_a_gap(
    tokenizer: AlbertTokenizer, question: Question, length: int, stride: int
) -> None:
    context = tokenizer.encode_plain(question.context).ids
    question_ids = tokenizer.encode_plain(question.question).ids[: min(64, (length - 3) // 2)]
    room = length - len(question_ids) - 3
    step = min(stride, room - room // 4)
    for number, window in enumerate(windows(question, tokenizer, length, stride)):
        part = context[number * step : number * step + room]
        assert window.ids == [2, *question_ids, 3, *part, 3]
        assert window.types == [0] * (len(question_ids) + 2) + [1] * (len(part) + 1)
        assert (window.start == 0) == (window.end == 0)
        if window.start:
            assert len(question_ids) + 2 <= window.start <= window.end < len(window.ids) - 1
    assert number * step + room >= len(context)
    assert number == 0 or (number - 1) * step + room < len(context)


def test_windows_without_the_whole_answer_point_at_cls(tokenizer: AlbertTokenizer) -> None:
    made = windows(LONG, tokenizer, 128)
    assert len(made) > 3
    assert 1 <= sum(window.start > 0 for window in made) < len(made)


def test_a_question_without_an_answer_points_at_cls(tokenizer: AlbertTokenizer) -> None:
    question = replace(QUESTIONS[0], answers=(), start=None)
    made = windows(question, tokenizer, 128)
    assert {(window.start, window.end) for window in made} == {(0, 0)}


def test_a_long_question_is_cut(tokenizer: AlbertTokenizer) -> None:
    question = replace(QUESTIONS[0], question="why " * 500)
    assert windows(question, tokenizer, 384)[0].ids[65] == 3


def test_an_empty_context_gives_one_window(tokenizer: AlbertTokenizer) -> None:
    question = Question(id="a", question="why", context="", answers=(), start=None)
    assert len(windows(question, tokenizer, 64)) == 1


@pytest.mark.parametrize("shift", [-10_000, -1, 1, 10_000])
def test_an_answer_that_stands_elsewhere_is_refused(tokenizer: AlbertTokenizer, shift: int) -> None:
    start = QUESTIONS[0].start
    assert start is not None
    question = replace(QUESTIONS[0], start=start + shift)
    with pytest.raises(CorpusError, match=f"question {question.id}: the context has .* not the"):
        windows(question, tokenizer, 128)
