"""The figure of a task is that of held-out data, or of export, and never an agreement."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from albert_serve.bundle.card import TaskFigure, read_figure
from albert_serve.bundle.manifest import MAX_EXAMPLES, Manifest, Quality


def manifest(**fields: Any) -> Manifest:
    return Manifest.model_validate({"config": {}, "tasks": {}, "files": {}, **fields})


def quality(metric: str) -> Quality:
    return Quality(metric=metric, torch=60.0, bundle=59.5, count=300)


def test_held_out_data_comes_before_the_data_of_export() -> None:
    evaluation = {"sentence_order_accuracy": 0.512, "sentence_order_pairs": 6194}
    both = manifest(evaluation=evaluation, quality={"sentence-order": quality("accuracy")})
    figure = read_figure(both, "sentence-order")
    assert figure is not None
    assert (figure.metric, figure.count) == ("accuracy", 6194)
    assert figure.percent == pytest.approx(51.2)


TEXTS = {"text_classification_texts": 7, "text_classification_loss": 0.1}


def of_texts(figures: Any) -> dict[str, float]:
    return TEXTS | {f"text_classification_{name}": value for name, value in figures.items()}


@pytest.mark.parametrize(
    ("task", "evaluation", "expected"),
    [
        (
            "question-answering",
            {"question_answering_f1": 29.0, "question_answering_questions": 50},
            ("F1", 29, 50),
        ),
        (
            "multiple-choice",
            {
                "multiple_choice_accuracy": 0.64,
                "multiple_choice_questions": 4887,
                "multiple_choice_high_accuracy": 0.6,
            },
            ("accuracy", 64, 4887),
        ),
        *(
            ("text-classification", of_texts(figures), expected)
            for figures, expected in [
                ({"micro_f1": 0.5, "macro_f1": 0.4, "subset_accuracy": 0.3}, ("micro-F1", 50, 7)),
                ({"pearson": -0.25, "spearman": 0.8, "mse": 1.5}, ("Pearson", -25, 7)),
                ({"spearman": 0.75, "mse": 1.5}, ("Spearman", 75, 7)),
                (
                    {"accuracy": 0.8, "macro_f1": 0.7, "matthews_correlation": 0.5},
                    ("Matthews correlation", 50, 7),
                ),
                ({"f1": 0.9, "accuracy": 0.8}, ("accuracy", 80, 7)),
                ({"pearson": math.nan, "spearman": None}, None),
                ({"pearson": 10**400, "spearman": True}, None),
            ]
        ),
        ("fill-mask", {}, None),
        ("fill-mask", {"masked_accuracy": 0.3}, None),
        ("fill-mask", {"masked_accuracy": "0.3", "masked_tokens": 5}, None),
        ("fill-mask", {"masked_accuracy": None, "masked_tokens": [5]}, None),
    ],
)
def test_a_task_has_the_figure_of_its_kind(
    task: str, evaluation: dict[str, Any], expected: tuple[str, float, int] | None
) -> None:
    agreed = manifest(evaluation=evaluation, quality={"fill-mask": quality("agreement")})
    figure = read_figure(agreed, task)
    assert (figure and (figure.metric, figure.percent, figure.count)) == expected


def test_export_measured_what_was_not_evaluated() -> None:
    measured = manifest(quality={"fill-mask": quality("accuracy")})
    assert read_figure(measured, "fill-mask") == TaskFigure(
        metric="accuracy", percent=59.5, count=300
    )
    assert read_figure(measured, "sentence-order") is None


@pytest.mark.parametrize(
    "examples",
    [
        [{"label": "no inputs"}],
        [{"inputs": "a", "label": ""}],
        [{"inputs": "a" * 20_000}],
        [{"inputs": "a"}] * (MAX_EXAMPLES + 1),
    ],
)
def test_examples_are_limited(examples: Any) -> None:
    with pytest.raises(ValidationError):
        manifest(examples={"fill-mask": examples})
