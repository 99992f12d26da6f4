"""Figures against official scripts, and values by hand and in the literature."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from training.tasks.metrics import metric_figures
from training.tasks.question_answering.files import Question, read_squad
from training.tasks.question_answering.metrics import (
    Outcome,
    find_best_threshold,
    mean_score,
    score_answer,
)

# 6 right positives, 1 missed, 2 false, 3 right negatives.
LABELS = np.array([1] * 6 + [1] + [0] * 2 + [0] * 3)
PREDICTED = np.array([1] * 6 + [0] + [1] * 2 + [0] * 3)


def logits_of(predicted: NDArray[np.int64], num_labels: int = 2) -> NDArray[np.float64]:
    return np.eye(num_labels)[predicted]


def test_classification_by_hand() -> None:
    figures = metric_figures(
        ("accuracy", "f1", "macro_f1", "matthews_correlation"), logits_of(PREDICTED), LABELS
    )
    negative_f1 = 2 * 3 / (2 * 3 + 1 + 2)
    positive_f1 = 2 * 6 / (2 * 6 + 1 + 2)
    assert figures == pytest.approx(
        {
            "accuracy": 9 / 12,
            "f1": positive_f1,
            "macro_f1": (positive_f1 + negative_f1) / 2,
            # Wikipedia's example of the coefficient, with the labels of cats and dogs.
            "matthews_correlation": 0.478,
        },
        abs=5e-4,
    )


def test_a_label_that_is_only_predicted_counts_in_macro_f1() -> None:
    """As in scikit-learn: 1 of 2 right, 2 of 2 right, and a label that no text has."""
    logits = logits_of(np.array([0, 2, 1, 1]), num_labels=3)
    figures = metric_figures(("macro_f1",), logits, np.array([0, 0, 1, 1]))
    assert figures["macro_f1"] == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_a_constant_prediction_has_no_correlation() -> None:
    figures = metric_figures(("pearson", "spearman"), np.ones((3, 1)), np.array([1.0, 2.0, 3.0]))
    assert all(math.isnan(value) for value in figures.values())


DATA = Path(__file__).resolve().parents[2] / "data/squad_dev"
OFFICIAL = json.loads((DATA / "figures.json").read_text())


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return content


def outcomes(side: int) -> list[Outcome]:
    """The scores of the recorded predictions of v2.0, by exact match (0) or F1 (1)."""
    predictions, null_scores = read("predictions-v2.0.json"), read("na_prob-v2.0.json")
    return [
        Outcome(
            score=score_answer(question, predictions[question.id], "2.0")[side],
            is_empty=not predictions[question.id],
            null_score=null_scores[question.id],
            has_answer=bool(question.answers),
        )
        for question in read_squad([DATA / "dev-v2.0.json"])
    ]


def test_figures_are_those_of_the_script_of_v1_1() -> None:
    questions = read_squad([DATA / "dev-v1.1.json"])
    predictions = read("predictions-v1.1.json")
    score = mean_score([score_answer(each, predictions[each.id], "1.1") for each in questions])
    expected = OFFICIAL["1.1"]
    assert len(questions) == expected["total"]
    assert score == pytest.approx((expected["exact_match"], expected["f1"]))


@pytest.mark.parametrize("part", ["", "HasAns_", "NoAns_"])
def test_figures_are_those_of_the_script_of_v2_0(part: str) -> None:
    predictions = read("predictions-v2.0.json")
    chosen = [
        question
        for question in read_squad([DATA / "dev-v2.0.json"])
        if not part or bool(question.answers) is (part == "HasAns_")
    ]
    score = mean_score([score_answer(each, predictions[each.id], "2.0") for each in chosen])
    assert len(chosen) == OFFICIAL["2.0"][f"{part}total"]
    expected = OFFICIAL["2.0"]
    assert score == pytest.approx((expected[f"{part}exact"], expected[f"{part}f1"]))


@pytest.mark.parametrize(("side", "name"), [(0, "exact"), (1, "f1")])
def test_the_best_threshold_is_that_of_the_script(side: int, name: str) -> None:
    expected = OFFICIAL["2.0"]
    best, threshold = find_best_threshold(outcomes(side))
    assert best == pytest.approx(expected[f"best_{name}"])
    assert threshold == expected[f"best_{name}_thresh"]


@given(
    st.lists(
        st.builds(
            Outcome,
            score=st.sampled_from([0.0, 0.5, 1.0]),
            is_empty=st.booleans(),
            null_score=st.integers(-3, 3).map(float),
            has_answer=st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
@settings(deadline=None)
def test_no_threshold_is_better_than_the_best(given_outcomes: list[Outcome]) -> None:
    def at(threshold: float) -> float:
        """The mean score of a model that answers nothing where the null score is over it."""
        scores = [
            float(not one.has_answer)
            if one.null_score > threshold
            else (one.score if one.has_answer else float(one.is_empty))
            for one in given_outcomes
        ]
        return 100 * sum(scores) / len(scores)

    best, threshold = find_best_threshold(given_outcomes)
    assert at(threshold) == pytest.approx(best)
    assert max(at(place / 2) for place in range(-9, 9)) == pytest.approx(best)


def test_answers_without_words_differ_between_the_versions() -> None:
    """v2.0 does not count them as answers; v1.1 gives them no F1."""
    dot = Question(id="a", question="?", context="", answers=(".", "the strike"), start=0)
    assert score_answer(dot, "", "1.1") == (1, 0)
    assert score_answer(dot, "", "2.0") == (0, 0)
    assert score_answer(dot, "strike", "2.0") == (1, 1)
