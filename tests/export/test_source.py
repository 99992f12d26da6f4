"""The tasks and labels of a checkpoint are those that its config and weights say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from albert_serve.bundle.weights import TaskName
from export.source import read_source
from tests.export.exporting import ALL_TASKS, write_checkpoint


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_head_for_the_next_sentence_is_not_one_for_order(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    change_config(tmp_path, albert_sentence_task="sop")
    assert "sentence-order" in read_source(tmp_path).tasks
    change_config(tmp_path, albert_sentence_task="nsp")
    assert set(read_source(tmp_path).tasks) == set(ALL_TASKS) - {"sentence-order"}


@pytest.mark.parametrize(
    ("config", "labels", "problem_type"),
    [
        ({}, ["LABEL_0", "LABEL_1"], "single_label_classification"),
        ({"id2label": {"0": "no", "1": "yes"}}, ["no", "yes"], "single_label_classification"),
        (
            {"problem_type": "multi_label_classification"},
            ["LABEL_0", "LABEL_1"],
            "multi_label_classification",
        ),
    ],
)
def test_labels(
    tmp_path: Path, config: dict[str, Any], labels: list[str], problem_type: str
) -> None:
    write_checkpoint(tmp_path, tasks=("text-classification",), extra_config=config)

    entry = read_source(tmp_path).tasks["text-classification"]

    assert entry.labels == labels
    assert entry.problem_type == problem_type


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("AlbertForMultipleChoice", "multiple-choice"),
        ("AlbertForSequenceClassification", "text-classification"),
    ],
)
def test_one_output_is_what_the_architecture_says(
    tmp_path: Path, architecture: str, task: TaskName
) -> None:
    write_checkpoint(tmp_path, tasks=("multiple-choice",))
    change_config(tmp_path, architectures=[architecture])

    tasks = read_source(tmp_path).tasks

    assert list(tasks) == [task]
    assert tasks[task].num_outputs == 1
    expected = "multi_label_classification" if task == "text-classification" else None
    assert tasks[task].problem_type == expected
