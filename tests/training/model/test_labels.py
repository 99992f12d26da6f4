"""Labels, problem type, name and temperature of a classifier in `config.json`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from training.model.checkpoint import CheckpointError
from training.model.labels import Labels, default_name, find_head, read_labels, read_temperature


def test_labels_and_problem_type_have_the_defaults_of_transformers() -> None:
    names = ["LABEL_0", "LABEL_1"]
    assert read_labels({}, 2) == Labels(names, "single_label_classification")
    assert read_labels({}, 1) == Labels(names[:1], "multi_label_classification")
    assert read_temperature({}, "text-classification") == 1.0


@pytest.mark.parametrize(
    ("read", "config", "message"),
    [
        (read_labels, {"id2label": ["a", "b"]}, "id2label of config.json is ['a', 'b'], not an"),
        (read_labels, {"id2label": {"0": "a"}}, 'has 2 outputs, so give "0" to "1" a name each.'),
        (read_labels, {"id2label": {"0": "a", "1": 2}}, "has 2 outputs"),
        (read_labels, {"problem_type": "rank"}, "problem_type of config.json is 'rank'. Use one"),
        (read_temperature, {"albert_temperature": 0}, "is 0. Use a number greater than 0."),
        (read_temperature, {"albert_temperature": math.inf}, "is inf. Use a number greater than"),
        (read_temperature, {"albert_temperature": "1"}, "is '1'. Use a number greater than 0."),
        (default_name, {"albert_default_head": "a/b"}, "of config.json is 'a/b', not a name."),
    ],
)
def test_wrong_values_are_rejected(
    read: Callable[..., Any], config: dict[str, Any], message: str
) -> None:
    arguments = {read_labels: (2,), read_temperature: ("text-classification",)}.get(read, ())
    with pytest.raises(CheckpointError) as caught:
        read(config, *arguments)
    assert message in str(caught.value)


def test_a_classifier_is_found_by_its_name() -> None:
    heads = ("text-classification", "text-classification/mood", "fill-mask")
    assert find_head({}, heads, "default") == "text-classification"
    assert find_head({"albert_default_head": "topic"}, heads, "topic") == "text-classification"
    assert find_head({}, heads, "mood") == "text-classification/mood"
    with pytest.raises(CheckpointError, match=r"no classifier 'x'\. Choose one of default, mood\."):
        find_head({}, heads, "x")
    with pytest.raises(CheckpointError, match=r"It has no classifiers\."):
        find_head({}, heads[2:], "x")
