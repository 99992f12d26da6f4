"""The best checkpoint is selected by one figure of one set of texts, and is not lost."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.training.processes import (
    count_time,
    die,
    get_signals,
    in_validation,
    run_in_process,
    spoil,
)
from tests.training.support import (
    SQUAD,
    SQUAD_V2,
    best_step,
    file_contents,
    read_metrics,
    run_command,
    same_weights,
    validations,
)
from training.commands import evaluate
from training.commands.finetune import main
from training.loop.early_stopping import BestValidation

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)


@pytest.fixture
def of_texts(classifier: Path, labelled: Path) -> list[str]:
    """A run that keeps one checkpoint beside the best; its end and validation are not given."""
    return [
        *("--initialize-from", str(classifier), "--length", "64"),
        *("--text-classification", str(labelled), "--labels", "negative", "positive"),
        *("--batch-size", "20", "--keep", "1"),
        *("--lr", "5e-3", "--precision", "fp32", "--device", "cpu", "--validate-every", "2"),
    ]


def test_a_run_selects_by_one_figure_of_one_set_of_texts(
    of_texts: list[str], labelled: Path, tmp_path: Path, capsys: Capture
) -> None:
    """By their content, wherever they are; training without validation keeps the best.

    On texts with the other label, training makes the loss worse.
    """
    texts, folder = tmp_path / "dev.tsv", tmp_path / "run"
    flipped = {"0": "1", "1": "0"}
    lines = labelled.read_text().splitlines()
    text = "\n".join(line[:-1] + flipped.get(line[-1], line[-1]) for line in lines)
    texts.write_text(text)
    held_out = ("--validation", str(texts), "--metric", "loss")
    assert run(of_texts, folder, "--steps", "2", *held_out) == 0
    assert run(of_texts, folder, "--steps", "5") == 0
    assert best_step(folder) == 2
    assert (folder / "best/model.safetensors").is_file()
    assert run(of_texts, folder, "--steps", "7", *held_out[:2], "--metric", "accuracy") == 1
    assert "the run selects its best checkpoint by loss of " in capsys.readouterr().err
    texts.write_text(text.replace("\t1", "\t0", 1))  # as many bytes
    assert run(of_texts, folder, "--steps", "7", *held_out) == 1
    error = capsys.readouterr().err
    assert "error: the run selects its best checkpoint by loss of dev.tsv (content " in error
    assert best_step(folder) == 2
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "dev.tsv"
    moved.write_text(text)
    assert run(of_texts, folder, "--steps", "7", "--validation", str(moved), *held_out[2:]) == 0
    losses = validations(folder, "text-classification", "loss")
    assert list(losses) == [2, 6, 7]
    assert losses[best_step(folder)] == min(losses.values())


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
    """And patience is at its end after two validations that are not better."""
    selection = BestValidation(figure=figure, patience=2)
    for step, (value, expected) in enumerate(zip(values, best_steps, strict=True), start=1):
        is_best = selection.take(step, {figure: value, "other": 9.0})
        assert selection.best_step == expected
        assert is_best == (expected == step)
        assert selection.is_over == (step - (expected or 0) >= 2)


def test_the_best_checkpoint_has_the_best_f1(start: list[str], tmp_path: Path) -> None:
    """Questions without an answer count, too, at the best threshold."""
    folder = tmp_path / "run"
    data = ("--question-answering", str(SQUAD), "--batch-size", "8", "--steps", "12")
    assert run([*start, *data], folder, "--validate-every", "4", "--validation", str(SQUAD_V2)) == 0
    values = validations(folder, "question-answering", "f1")
    assert list(values) == [4, 8, 12]
    best = best_step(folder)
    assert values[best] == max(values.values())
    measured = ["--question-answering", str(SQUAD_V2), "--device", "cpu"]
    assert evaluate.main([str(folder / "best"), *measured]) == 0
    figures = json.loads((folder / "best" / "evaluation.json").read_text())
    assert figures["question_answering_best_f1"] == pytest.approx(values[best], abs=1e-4)


TASK = "text-classification"
apart = partial(run_in_process, program="training.commands.finetune")


@pytest.fixture
def seven(of_texts: list[str], labelled: Path) -> list[str]:
    """The run with seven steps, nearly four epochs, that is validated on its own texts."""
    held_out = ("--validation", str(labelled), "--metric", "loss")
    return [*of_texts, *held_out, "--steps", "7", "--adamw-lr", "1e-2"]


def test_the_end_is_validated_also_where_its_step_was_skipped(
    seven: list[str], tmp_path: Path
) -> None:
    options = [*seven, "--steps", "4", "--validate-every", "4"]
    assert apart(options, tmp_path / "run", fate=partial(spoil, {4})).status == 0
    assert list(validations(tmp_path / "run", TASK, "loss")) == [4]
    assert best_step(tmp_path / "run") == 4


@pytest.mark.parametrize("more", [["--steps", "1"], ["--budget", "1s"]], ids=lambda m: m[0])
def test_a_run_that_is_shorter_than_an_epoch_has_a_best_checkpoint(
    seven: list[str], tmp_path: Path, more: list[str]
) -> None:
    """By its steps, and by its seconds."""
    fate = partial(count_time, 1.0)
    assert apart([*seven, *more], tmp_path / "run", fate=fate).status == 0
    assert list(validations(tmp_path / "run", TASK, "loss")) == [1]
    assert best_step(tmp_path / "run") == 1


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run without TensorBoard's, which get a new one each time."""
    files = file_contents(folder).items()
    return {name: content for name, content in files if not name.startswith("tensorboard")}


@pytest.mark.parametrize(
    ("happens", "status"),
    [
        (die, -signal.SIGKILL),
        (partial(get_signals, signal.SIGTERM), 128 + signal.SIGTERM),
    ],
    ids=["killed", "stopped"],
)
def test_a_run_that_ends_in_its_last_validation_goes_on_as_one_that_does_not(
    seven: list[str], tmp_path: Path, happens: Callable[[], None], status: int
) -> None:
    """What is validated when the run is started again is known from then on."""
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    assert run(seven, whole, "--steps", "2", "--validate-every", "9") == 0
    options = [*seven, "--steps", "2", "--validate-every", "9"]
    assert apart(options, ended, fate=partial(in_validation, happens)).status == status
    assert not (ended / "best").exists()
    assert run(options, ended) == 0
    assert same_weights(ended, whole)
    assert best_step(ended) == best_step(whole) == 2
    assert validations(ended, TASK, "loss") == validations(whole, TASK, "loss")
    before = contents(ended)
    assert apart(options, ended, fate=partial(in_validation, die)).status == 0
    assert contents(ended) == before


def test_a_run_that_is_extended_does_not_stop_for_its_former_end(
    seven: list[str], tmp_path: Path
) -> None:
    """With rates so low that no validation is better than the first."""
    still = [*seven, "--lr", "1e-12", "--adamw-lr", "1e-12", "--metric", "accuracy"]
    still += ["--validate-every", "2", "--patience", "2"]
    assert run(still, tmp_path / "run", "--steps", "5") == 0
    assert list(validations(tmp_path / "run", TASK, "accuracy")) == [2, 4, 5]
    assert run(still, tmp_path / "run", "--steps", "9") == 0
    assert list(validations(tmp_path / "run", TASK, "accuracy")) == [2, 4, 5, 6]
    assert read_metrics(tmp_path / "run")[-1]["step"] == 6
