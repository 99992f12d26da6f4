"""The figures of one answer for all texts, by hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from albert_serve.bundle.manifest import ProblemType
from training.evaluation.metrics import chance_level, metric_figures
from training.glue.tasks import Metric


def measure(metric: Metric, logits: Tensor, targets: Tensor) -> dict[str, float]:
    return metric_figures((metric,), logits.numpy(), targets.numpy())


@pytest.mark.parametrize(
    ("problem", "figure", "targets", "expected"),
    [
        ("single_label_classification", "accuracy", [0, 2, 2, 2], 0.75),
        ("single_label_classification", "f1", [0, 1, 1], 0.8),
        ("single_label_classification", "matthews_correlation", [0, 1, 1], 0),
        ("single_label_classification", "loss", [0, 0, 1, 1], math.log(2)),
        ("multi_label_classification", "micro_f1", [[1, 0], [1, 1], [0, 0], [1, 0]], 0.75),
        (
            "multi_label_classification",
            "micro_f1",
            [*[[1, 1, 0]] * 2, [0, 0, 1], *[[0] * 3] * 2],
            8 / 15,
        ),
        ("multi_label_classification", "subset_accuracy", [[0, 0], [1, 1], [0, 0]], 2 / 3),
        ("multi_label_classification", "loss", [[0, 1], [1, 1]], math.log(2) / 2),
        ("regression", "pearson", [1.0, 2.0, 3.0], 0),
        ("regression", "mse", [1.0, 3.0], 1),
        ("regression", "loss", [1.0, 3.0], 1),
    ],
)
def test_the_best_constant(
    problem: ProblemType, figure: Any, targets: list[Any], expected: float
) -> None:
    num_labels = {"single_label_classification": 3, "regression": 1}.get(problem)
    if num_labels is None:
        num_labels = len(targets[0])
    if figure == "f1":
        num_labels = 2
    level = chance_level(figure, np.array(targets), num_labels, problem, partial(measure, figure))
    assert level == pytest.approx(expected)
