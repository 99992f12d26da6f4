"""Two processes finetune every task to the same weights and validations as one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.training.processes import check_close, check_ended, run_in_process, run_processes
from tests.training.support import (
    SQUAD,
    WIKI,
    best_step,
    checkpoint_state,
    largest_weight_change,
)

PROGRAM = "training.commands.finetune"
# Softmax cancels these biases, so their gradients contain only rounding errors.
WITHOUT_GRADIENT = (
    "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.key.bias",
    "qa_outputs.bias",
)

run_alone = partial(run_in_process, program=PROGRAM)
run_together = partial(run_processes, program=PROGRAM)
# The runs differ only in the order of sums. After 6 steps in fp32, which change weights by 1e-2 and
# more, weights differ by 2e-7 to 1e-6.
check_same_run = partial(check_close, weights=1e-5, metrics=1e-4, ignored_weights=WITHOUT_GRADIENT)


@pytest.fixture
def exact_options(short_finetune_options: list[str]) -> list[str]:
    """The options of a run of six steps without dropout, except its data."""
    rates = ("--optimizer", "adamw", "--lr", "3e-3", "--dropout", "0", "--classifier-dropout", "0")
    return [*short_finetune_options, *rates, "--report-every", "1", "--keep", "20"]


def test_two_processes_train_several_tasks_as_one_process(
    exact_options: list[str], tmp_path: Path
) -> None:
    """The tasks are multi-label classification, regression, questions and pretraining.

    If the task allows it, the batches do not divide evenly.
    """
    moods, scores = tmp_path / "moods.jsonl", tmp_path / "scores.csv"
    rows = [("a good game", ["glad"]), ("the war was lost", ["sad"]), ("a city", [])] * 5
    moods.write_text("\n".join(json.dumps({"text": t, "label": names}) for t, names in rows))
    scores.write_text("text,label\n" + "a good game,1\nthe war was lost,-1.5\n" * 6)
    options = [
        *(*exact_options, "--text-classification", str(moods)),
        *("--problem-type", "multi_label_classification"),
        *("--question-answering", str(SQUAD), "--pretraining", str(WIKI)),
        *("--head", "score", "--text-classification", str(scores), "--problem-type", "regression"),
        *("--batch-size", "7", "5", "3", "4", "--steps", "12"),
    ]
    assert run_alone(options, tmp_path / "one").status == 0
    check_ended(run_together(options, tmp_path / "two"))
    check_same_run(tmp_path / "one", tmp_path / "two")
    assert largest_weight_change(tmp_path / "one") > 5e-3


def test_two_processes_validate_and_select_as_one_process(
    exact_options: list[str], labelled_texts: Path, tmp_path: Path
) -> None:
    """The micro-batches differ. The metric depends on all texts, and selects during the run too."""
    one, two = tmp_path / "one", tmp_path / "two"
    data = ["--text-classification", str(labelled_texts), "--validation", str(labelled_texts)]
    options = [*exact_options, *data, "--batch-size", "13"]
    options += ["--validate-every", "4", "--metric", "macro_f1"]
    assert run_alone(options, one).status == 0
    processes = run_together(options, two, "--micro-batch-size", "4")
    check_ended(processes)
    assert "validation of text-classification: loss" in processes[0].out + processes[0].err
    check_same_run(one, two)
    assert best_step(one) == best_step(two)
    selections = [checkpoint_state(folder)["selection"] for folder in (one, two)]
    assert selections[0] == pytest.approx(selections[1])
