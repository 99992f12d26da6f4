"""The best validation is kept, and patience ends."""

from __future__ import annotations

import math

import pytest

from training.loop.selection import Selection


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
    selection = Selection(figure=figure)
    for step, (value, best_step) in enumerate(zip(values, best_steps, strict=True), start=1):
        is_best = selection.take(step, {figure: value, "other": 9.0})
        assert selection.best_step == best_step
        assert is_best == (best_step == step)
        assert selection.validated_step == step


def test_patience_counts_validations_without_a_better_one() -> None:
    selection = Selection(figure="accuracy", patience=2)
    ends = []
    for step, value in enumerate([0.5, 0.4, 0.6, 0.6, 0.5]):
        selection.take(step, {"accuracy": value})
        ends.append(selection.is_over)
    assert ends == [False, False, False, False, True]
    assert not Selection(figure="accuracy", num_since=9).is_over


def test_a_saved_state_goes_on() -> None:
    one, other = (Selection(figure="loss", patience=2) for _ in range(2))
    one.take(3, {"loss": 0.5})
    one.take(6, {"loss": 0.6})
    other.restore(one.state())
    assert other == one
    by_accuracy = Selection(figure="accuracy")
    by_accuracy.restore(one.state())
    assert by_accuracy == Selection(figure="accuracy")
