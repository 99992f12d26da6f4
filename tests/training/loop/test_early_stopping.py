"""The best validation is kept, and patience ends."""

from __future__ import annotations

import math

import pytest

from training.loop.early_stopping import BestValidation


@pytest.mark.parametrize(
    ("figure", "values", "best_steps"),
    [
        ("accuracy", [0.5, 0.7, 0.7, 0.6, 0.8], [1, 2, 2, 2, 5]),
        ("loss", [0.5, 0.7, 0.4, 0.4], [1, 1, 3, 3]),
        ("pearson", [math.nan, -0.1, math.nan, 0.1], [None, 2, 2, 4]),
    ],
)
def test_the_first_of_the_best(
    figure: str, values: list[float], best_steps: list[int | None]
) -> None:
    selection = BestValidation(figure=figure)
    for step, (value, best_step) in enumerate(zip(values, best_steps, strict=True), start=1):
        is_best = selection.take(step, {figure: value, "other": 9.0})
        assert selection.best_step == best_step
        assert is_best == (best_step == step)


def test_patience_counts_validations_without_a_better_one() -> None:
    selection = BestValidation(figure="accuracy", patience=2)
    ends = []
    for step, value in enumerate([0.5, 0.4, 0.6, 0.6, 0.5]):
        selection.take(step, {"accuracy": value})
        ends.append(selection.is_over)
    assert ends == [False, False, False, False, True]
    assert not BestValidation(figure="accuracy", num_since=9).is_over


def test_the_end_of_a_run_counts_for_the_best_and_not_for_patience() -> None:
    selection = BestValidation(figure="accuracy", patience=1)
    assert selection.improve(1, {"accuracy": 0.5})
    assert not selection.improve(2, {"accuracy": 0.4})
    assert not selection.is_over
    assert selection.improve(3, {"accuracy": 0.6})
    assert selection.best_step == 3


@pytest.mark.parametrize(
    ("value", "chance", "has_collapsed"),
    [(0.6, 0.5, False), (0.5, 0.5, True), (0.4, 0.5, True), (0.4, None, False)],
)
def test_a_run_that_is_no_better_than_one_answer_has_collapsed(
    value: float, chance: float | None, has_collapsed: bool
) -> None:
    selection = BestValidation(figure="accuracy", chance=chance)
    assert selection.has_collapsed
    selection.take(1, {"accuracy": math.nan})
    assert selection.has_collapsed
    selection.take(2, {"accuracy": value})
    assert selection.has_collapsed == has_collapsed
