"""Exact match and F1 as the official script gives them."""

from __future__ import annotations

import pytest

from training.data.questions import Question
from training.evaluation.squad import evaluate_answers, normalize, token_f1


def question(name: str, *answers: str) -> Question:
    start = 0 if answers else None
    return Question(id=name, question="?", context="", answers=answers, start=start)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("a an the", ""),
        ("theme of an Anthem", "theme of anthem"),
        ("U.S.\tArmy", "us army"),
        ("–", "–"),
    ],
)
def test_normalize(text: str, normalized: str) -> None:
    assert normalize(text) == normalized


@pytest.mark.parametrize(
    ("predicted", "answer", "f1"),
    [
        ("the cat", "Cat.", 1.0),
        ("black cat", "cat", 2 / 3),  # precision 1/2, recall 1
        ("cat cat", "cat dog", 0.5),  # a word counts as often as both have it
        ("dog", "cat", 0.0),
        ("", "", 1.0),
        ("the", "", 1.0),
        ("", "cat", 0.0),
    ],
)
def test_f1_by_hand(predicted: str, answer: str, f1: float) -> None:
    assert token_f1(predicted, answer) == pytest.approx(f1)


def test_the_best_of_several_answers_counts() -> None:
    questions = [question("a", "cat", "black cat"), question("b", "dog", "old dog")]
    exact, f1 = evaluate_answers(questions, {"a": "the black cat", "b": "very old dog"})
    assert exact == 50
    assert f1 == pytest.approx((1 + 0.8) / 2 * 100)


def test_no_answer_is_right_where_there_is_none() -> None:
    questions = [question("a"), question("b"), question("c", "cat"), question("d", "the")]
    assert evaluate_answers(questions, {"a": "", "b": "dog", "c": "", "d": ""}) == (50.0, 50.0)


def test_a_question_without_a_prediction_is_wrong() -> None:
    assert evaluate_answers([question("a", "cat"), question("b")], {"a": "cat"}) == (50.0, 50.0)
