"""Tasks of GLUE and RACE are trained, validated and evaluated; the best checkpoint is kept."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.training.support import (
    RACE,
    best_step,
    checkpoint_state,
    evaluated,
    read_metrics,
    run_command,
    same_weights,
    stop_at,
    validations,
)
from training.commands.finetune import main
from training.model.checkpoint import read_config
from training.model.heads import Task

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)

TASK: Final[Task] = "text-classification"
PAIRS = ("the game was good", "a city was great", "his music died", "her work was lost")
MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
    "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label"
)


def write(folder: Path, rows_of: Mapping[str, Sequence[str]]) -> Path:
    folder.mkdir()
    for name, rows in rows_of.items():
        (folder / name).write_text("\n".join([*rows, ""]), encoding="utf-8")
    return folder


@pytest.fixture
def cola(tmp_path: Path) -> Path:
    """Sentences in order, and in reverse."""
    rows = [f"x\t1\t\t{text}" for text in PAIRS]
    rows += [f"x\t0\t*\t{' '.join(reversed(text.split()))}" for text in PAIRS]
    return write(tmp_path / "cola", {"train.tsv": rows, "dev.tsv": rows})


@pytest.fixture
def stsb(tmp_path: Path) -> Path:
    """Pairs of the same sentence, of others, and of one that is named twice."""
    rows = [f"g\tf\t12\t1\t5.000\t{text}\t{text}" for text in PAIRS]
    rows += [f"g\tf\t12\t1\t{n}.5\t{PAIRS[n]}\t{PAIRS[n - 1]}\ta\tb" for n in range(4)]
    return write(tmp_path / "stsb", {"sts-train.tsv": rows, "sts-dev.tsv": rows})


@pytest.fixture
def mnli(tmp_path: Path) -> Path:
    labels = ("entailment", "neutral", "contradiction", "entailment")
    rows = [MNLI]
    for number, label in enumerate(labels):
        texts = f"{PAIRS[number]}\t{PAIRS[number - 1]}"
        rows.append(f"{number}\t1\t1n\tfiction\t(\t(\t(\t(\t{texts}\t{label}\t{label}")
    files = {"train.tsv": rows, "dev_matched.tsv": rows, "dev_mismatched.tsv": rows[:3]}
    return write(tmp_path / "mnli", files)


@pytest.mark.parametrize(
    ("task", "figure", "labels"),
    [
        ("cola", "matthews_correlation", ["unacceptable", "acceptable"]),
        ("stsb", "combined_score", ["score"]),
    ],
)
def test_the_best_checkpoint_has_the_figures_of_its_validation(
    start: list[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    task: str,
    figure: str,
    labels: list[str],
) -> None:
    """By the official metrics, which `albert-serve evaluate` computes on whole, padded texts."""
    data: Path = request.getfixturevalue(task)
    folder, options = tmp_path / "run", ["--task", task, "--data", str(data)]
    assert run([*start, "--keep", "1", *options], folder) == 0
    measured = validations(folder, TASK, figure)
    assert list(measured) == [0, 2, 4, 6]
    best = best_step(folder)
    assert measured[best] == max(measured.values())
    assert best == min(step for step, value in measured.items() if value == measured[best])
    figures = evaluated(folder / "best", *options)
    name = f"text_classification_{figure}"
    assert figures[name] == pytest.approx(measured[best], abs=1e-3)
    loss = validations(folder, TASK, "loss")[best]
    assert figures["text_classification_loss"] == pytest.approx(loss, rel=1e-3)
    config = read_config(folder / "best")
    assert list(config["id2label"].values()) == labels
    problem = "regression" if task == "stsb" else "single_label_classification"
    assert config["problem_type"] == problem
    if task == "cola":  # predictions are of the test file, also of an empty text
        (data / "test.tsv").write_text("index\tsentence\n0\tthe game was good\n1\t\n2\tgood\n")
        evaluated(folder / "best", *options, "--predictions", str(data / "CoLA.tsv"))
        header, *lines = (data / "CoLA.tsv").read_text().splitlines()
        assert header == "index\tprediction"
        assert [line.split("\t")[0] for line in lines] == ["0", "1", "2"]
        assert {line.split("\t")[1] for line in lines} <= {"0", "1"}


def test_both_held_out_files_of_mnli_are_evaluated(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    rows = [MNLI]
    for number, label in enumerate(("entailment", "neutral", "contradiction", "entailment")):
        texts = f"{PAIRS[number]}\t{PAIRS[number - 1]}"
        rows.append(f"{number}\t1\t1n\tfiction\t(\t(\t(\t(\t{texts}\t{label}\t{label}")
    files = {"train.tsv": rows, "dev_matched.tsv": rows, "dev_mismatched.tsv": rows[:3]}
    data = ["--task", "MNLI", "--data", str(write(tmp_path / "mnli", files))]
    assert run([*start, *data], tmp_path / "run") == 0
    assert "new classifier" not in capsys.readouterr().out  # there was none before
    figures = evaluated(tmp_path / "run" / "best", *data)
    assert figures["text_classification_texts"] == 4
    assert figures["text_classification_mismatched_texts"] == 2
    assert 0 <= figures["text_classification_mismatched_accuracy"] <= 1


def test_a_run_that_is_stopped_in_validation_goes_on_as_one_that_was_not(
    start: list[str], cola: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation that the signal interrupted counts: for the best, and for patience."""
    options = [*start, "--task", "cola", "--data", str(cola), "--dropout", "0.1"]
    options += ["--steps", "10", "--patience", "3", "--metric", "loss", "--keep", "1"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(options, whole) == 0
    for step in (2, 5):
        with monkeypatch.context() as patch:
            stop_at(patch, step, signal.SIGTERM)
            assert run(options, stopped) == 143
    assert checkpoint_state(stopped)["step"] == 5
    assert run(options, stopped) == 0
    assert same_weights(stopped, whole)
    assert best_step(stopped) == best_step(whole)
    assert validations(stopped, TASK, "loss") == validations(whole, TASK, "loss")


def test_class_weights_change_the_weights(start: list[str], cola: Path, tmp_path: Path) -> None:
    """Balanced ones are 1 of balanced data."""
    options = [*start, "--steps", "2", "--task", "cola", "--data", str(cola)]
    for name, more in (
        ("plain", []),
        ("balanced", ["--class-weights", "balanced"]),
        ("numbers", ["--class-weights", "1", "3"]),
    ):
        assert run(options, tmp_path / name, *more) == 0
    assert same_weights(tmp_path / "plain", tmp_path / "balanced")
    assert not same_weights(tmp_path / "plain", tmp_path / "numbers")


@pytest.fixture
def race(start: list[str]) -> list[str]:
    return [*start, "--batch-size", "6", "--task", "RACE", "--data", str(RACE)]


losses = partial(validations, task="multiple-choice", figure="loss")


def test_the_questions_of_real_passages_are_learnt(race: list[str], tmp_path: Path) -> None:
    more = ("--steps", "120", "--batch-size", "12", "--validate-every", "60", "--seed", "1")
    assert run([*race, *more, "--report-every", "20"], tmp_path / "run") == 0
    first, *_, last = (
        line for line in read_metrics(tmp_path / "run") if "multiple-choice/accuracy" in line
    )
    assert last["multiple-choice/accuracy"] > 0.9
    assert last["multiple-choice/loss"] < 0.5 * first["multiple-choice/loss"]
    data = ("--multiple-choice", str(RACE / "train"))
    figures = evaluated(tmp_path / "run" / "checkpoint", *data)
    assert figures["multiple_choice_accuracy"] > 0.9
    assert figures["multiple_choice_questions"] == 12


def test_the_best_checkpoint_of_choices_has_the_figures_of_its_validation(
    race: list[str], start: list[str], tmp_path: Path
) -> None:
    """By accuracy, which `albert-serve evaluate` computes on padded texts, for both levels.

    A folder of the task's is read by its splits, too.
    """
    folder = tmp_path / "run"
    assert run(race, folder) == 0
    own = [*start, "--batch-size", "6", "--multiple-choice", str(RACE)]
    assert run(own, tmp_path / "own") == 0
    assert same_weights(tmp_path / "own", folder)
    assert losses(tmp_path / "own") == losses(folder)
    measured = validations(folder, "multiple-choice", "accuracy")
    assert list(measured) == [2, 4, 6]
    best = best_step(folder)
    assert best == min(step for step in measured if measured[step] == max(measured.values()))
    figures = evaluated(folder / "best", "--task", "race", "--data", str(RACE))
    assert figures["multiple_choice_task"] == "RACE"
    assert figures["multiple_choice_accuracy"] == pytest.approx(measured[best])
    loss = losses(folder)[best]
    assert figures["multiple_choice_loss"] == pytest.approx(loss, rel=1e-3)
    levels = [figures[f"multiple_choice_{level}_accuracy"] for level in ("high", "middle")]
    assert sum(levels) / 2 == pytest.approx(measured[best])
    config = read_config(folder / "best")
    assert "AlbertForMultipleChoice" in config["architectures"]
    assert "id2label" not in config
