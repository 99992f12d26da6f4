"""Labels, problem type, name and temperature of a classifier in `config.json`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from training.model.checkpoint import CheckpointError, label_keys
from training.model.labels import (
    default_name,
    find_head,
    head_record,
    labels_config,
    read_labels,
    read_temperature,
    with_temperatures,
)

MOOD = "text-classification/mood"


def test_each_classifier_has_its_name_labels_and_temperature() -> None:
    records = {
        "text-classification": label_keys(["bad", "good"]),
        MOOD: label_keys(["a", "b", "c"], multi_label=True),
        "fill-mask": {},
    }
    heads = list(records)[:2]
    config = labels_config(records, "tone")
    assert default_name(config) == "tone"
    assert [find_head(config, records, name) for name in ("tone", "mood")] == heads
    assert find_head({}, records, "default") == "text-classification"
    assert read_labels(config, 2) == (["bad", "good"], "single_label_classification")
    assert read_labels(config, 3, MOOD) == (["a", "b", "c"], "multi_label_classification")
    assert [read_temperature(config, head) for head in heads] == [1, 1]
    config = with_temperatures(config, {"text-classification": 1.5, MOOD: 0.5})
    assert [read_temperature(config, head) for head in heads] == [1.5, 0.5]
    with pytest.raises(CheckpointError, match=r"no classifier 'x'\. Choose one of tone, mood\."):
        find_head(config, records, "x")
    with pytest.raises(CheckpointError, match=r"It has no classifiers\."):
        find_head({}, ["fill-mask"], "x")


def test_labels_and_problem_type_have_the_defaults_of_transformers() -> None:
    names = ["LABEL_0", "LABEL_1"]
    assert read_labels({}, 2) == (names, "single_label_classification")
    assert read_labels({}, 1) == (names[:1], "multi_label_classification")
    assert read_labels(label_keys(["score"]), 1).problem == "regression"


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
        (partial(head_record, head=MOOD), {"albert_heads": "a"}, "is 'a', not an object"),
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
