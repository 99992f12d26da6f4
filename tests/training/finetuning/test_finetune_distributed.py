"""Several processes finetune as one does: each task, its validation, and deaths."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.training.processes import (
    Ended,
    before_step,
    get_signals,
    run_in_process,
    run_world,
)
from tests.training.support import (
    RACE,
    SQUAD,
    SQUAD_V2,
    WIKI,
    best_step,
    checkpoint_state,
    moved,
    read_metrics,
)

PROGRAM = "training.commands.finetune"
STEPS = 6
# What sets the runs apart is the order of sums. Measured in fp32 after these 6 steps, which move
# weights by 1e-2 and more: 2e-7 to 1e-6 between weights.
CLOSE = 1e-5
# The biases of scores that are compared by a softmax have no gradient but that of rounding: those
# of attention's keys in all models.
KEY_BIAS = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.key.bias"
WITHOUT_GRADIENT: dict[str, tuple[str, ...]] = {
    "questions": ("qa_outputs.bias",),
    "several": ("qa_outputs.bias",),
    "multiple choice": ("classifier.bias",),
}

alone = partial(run_in_process, program=PROGRAM)
together = partial(run_world, program=PROGRAM)


@pytest.fixture
def exact(start: list[str]) -> list[str]:
    """A run of six steps without dropout; its data is left to be named."""
    rates = ("--optimizer", "adamw", "--lr", "3e-3", "--dropout", "0", "--classifier-dropout", "0")
    return [*start, *rates, "--report-every", "1", "--keep", "20"]


@pytest.fixture
def texts(exact: list[str], labelled: Path) -> list[str]:
    """The run on labelled texts, 13 a step, validated amidst and at the end, by a metric of all."""
    data = ["--text-classification", str(labelled), "--validation", str(labelled)]
    return [*exact, *data, "--batch-size", "13", "--validate-every", "4", "--metric", "macro_f1"]


def check_ended(ended: Sequence[Ended], status: int = 0) -> None:
    """The main process alone says something."""
    assert [each.status for each in ended] == [status] * len(ended), [each.err for each in ended]
    for other in ended[1:]:
        assert (other.out, other.err) == ("", "")


def check_close(one: Path, other: Path, *, without_gradient: Sequence[str] = ()) -> None:
    """Two runs have the same curves and validations, and weights, up to their last digits."""
    lines = [read_metrics(folder) for folder in (one, other)]
    assert len(lines[0]) >= STEPS
    for mine, theirs in zip(*lines, strict=True):
        for name in mine.keys() - {"elapsed_s", "tokens_per_s"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), (mine, name)
    tensors = [load_file(folder / "checkpoint" / "model.safetensors") for folder in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        if name not in (KEY_BIAS, *without_gradient):
            assert (tensor - tensors[1][name]).abs().max() < CLOSE, name


def several(folder: Path) -> list[str]:
    """Two classifiers, of several labels and of a number, beside questions and text."""
    moods, scores = folder / "moods.jsonl", folder / "scores.csv"
    rows = [("a good game", ["glad"]), ("the war was lost", ["sad"]), ("a city", [])] * 5
    moods.write_text("\n".join(json.dumps({"text": t, "label": names}) for t, names in rows))
    scores.write_text("text,label\n" + "a good game,1\nthe war was lost,-1.5\n" * 6)
    return [
        *("--text-classification", str(moods), "--problem-type", "multi_label_classification"),
        *("--question-answering", str(SQUAD), "--pretraining", str(WIKI)),
        *("--head", "score", "--text-classification", str(scores), "--problem-type", "regression"),
        *("--batch-size", "7", "5", "3", "4", "--steps", "12"),
    ]


TASKS: dict[str, Callable[[Path], list[str]]] = {
    "multiple choice": lambda _: ["--task", "RACE", "--data", str(RACE), "--validate-every", "3"],
    "questions": lambda _: [
        *("--question-answering", str(SQUAD), "--validation", str(SQUAD_V2)),
        *("--validate-every", "3"),
    ],
    "several": several,
}
# The others are extended tests.
MAIN = ("questions", "several")


@pytest.mark.parametrize(
    "task",
    [name if name in MAIN else pytest.param(name, marks=pytest.mark.extended) for name in TASKS],
)
def test_two_processes_train_as_one_does(exact: list[str], tmp_path: Path, task: str) -> None:
    """Of batches that two do not divide evenly, where the task allows it."""
    (tmp_path / "data").mkdir()
    options = [*exact, "--batch-size", "5", *TASKS[task](tmp_path / "data")]
    assert alone(options, tmp_path / "one").status == 0
    check_ended(together(options, tmp_path / "two"))
    check_close(tmp_path / "one", tmp_path / "two", without_gradient=WITHOUT_GRADIENT.get(task, ()))
    assert moved(tmp_path / "one") > 5e-3


@pytest.mark.parametrize("num_processes", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_texts_are_trained_and_validated_as_by_one(
    texts: list[str], tmp_path: Path, num_processes: int
) -> None:
    """Also in other micro-batches."""
    one, several = tmp_path / "one", tmp_path / "several"
    assert alone(texts, one).status == 0
    ended = together(texts, several, "--micro-batch-size", "4", num_processes=num_processes)
    check_ended(ended)
    assert "validation of text-classification: loss" in ended[0].out + ended[0].err
    check_close(one, several)
    assert best_step(one) == best_step(several)
    selections = [checkpoint_state(folder)["selection"] for folder in (one, several)]
    assert selections[0] == pytest.approx(selections[1])


def test_the_number_of_processes_may_change_amidst_a_run(texts: list[str], tmp_path: Path) -> None:
    """A signal to either of two ends both; one goes on."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert alone(texts, whole).status == 0
    stop = partial(before_step, 4, partial(get_signals, signal.SIGTERM))
    check_ended(together(texts, run, fates={1: stop}), 128 + signal.SIGTERM)
    assert checkpoint_state(run)["step"] == 4
    assert "Resuming from step 4.\n" in alone(texts, run).out
    check_close(run, whole)


def test_an_error_in_the_data_is_reported_once(exact: list[str], tmp_path: Path) -> None:
    """By the main process; if it reads other data, by the one that has it."""
    file = tmp_path / "bad.tsv"
    file.write_text("text\tmood\na city\t1\na war\t0\n")
    options = [*exact, "--text-classification", str(file)]
    first, second = together(options, tmp_path / "run")
    assert (first.status, second.status) == (1, 1)
    assert "bad.tsv" in first.err
    assert (first.out, second.out, second.err) == ("", "", "")
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_batch_that_is_too_small_for_the_processes_is_refused(
    texts: list[str], tmp_path: Path
) -> None:
    first, second = together([*texts, "--batch-size", "1"], tmp_path / "run")
    assert (first.status, second.status, second.err) == (1, 1, "")
    (line,) = first.err.splitlines()
    assert "--batch-size 1 of text-classification has 1 of 40 examples in a step" in line
    assert not (tmp_path / "run").exists()
