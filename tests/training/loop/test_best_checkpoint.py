"""The best checkpoint is selected by one figure of one set of texts, and is not lost."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.training.loop.stub import TASK, Killed, Stub, kill, train
from tests.training.support import (
    SQUAD,
    SQUAD_V2,
    best_step,
    file_contents,
    run_command,
    same_weights,
    validations,
)
from training.commands import evaluate
from training.commands.finetune import main
from training.errors import RunError
from training.loop.early_stopping import BestValidation

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)
stop = partial(os.kill, os.getpid(), signal.SIGTERM)


def selection(patience: int | None = None, criterion: str = "accuracy of these") -> BestValidation:
    return BestValidation(metric="accuracy", criterion=criterion, patience=patience)


def test_a_run_selects_by_one_figure_of_one_set_of_texts(
    classifier: Path, labelled: Path, tmp_path: Path, capsys: Capture
) -> None:
    """By their content, wherever they are."""
    texts, moved, folder = tmp_path / "dev.tsv", tmp_path / "elsewhere/dev.tsv", tmp_path / "run"
    texts.write_bytes(labelled.read_bytes())
    options = [
        *("--initialize-from", str(classifier), "--length", "64", "--device", "cpu"),
        *("--text-classification", str(labelled), "--labels", "negative", "positive"),
        *("--batch-size", "20", "--validate-every", "1"),
    ]
    held_out = ("--validation", str(texts), "--metric")
    assert run(options, folder, "--steps", "1", *held_out, "loss") == 0
    assert run(options, folder, "--steps", "2", *held_out, "accuracy") == 1
    assert "The run selects its best checkpoint by loss of " in capsys.readouterr().err
    texts.write_text(labelled.read_text().replace("\t1", "\t0", 1))  # as many bytes
    assert run(options, folder, "--steps", "2", *held_out, "loss") == 1
    error = capsys.readouterr().err
    assert "error: The run selects its best checkpoint by loss of dev.tsv (content " in error
    moved.parent.mkdir()
    moved.write_bytes(labelled.read_bytes())
    assert (
        run(options, folder, "--steps", "2", "--validation", str(moved), *held_out[2:], "loss") == 0
    )
    losses = validations(folder, "text-classification", "loss")
    assert list(losses) == [1, 2]
    assert losses[best_step(folder)] == min(losses.values())


def test_the_best_checkpoint_has_the_best_f1(start: list[str], tmp_path: Path) -> None:
    """Questions without an answer count, too, at the best threshold."""
    folder = tmp_path / "run"
    data = ("--question-answering", str(SQUAD), "--batch-size", "8", "--steps", "12")
    assert run([*start, *data], folder, "--validate-every", "4", "--validation", str(SQUAD_V2)) == 0
    values = validations(folder, "question-answering", "f1")
    best = best_step(folder)
    assert values[best] == max(values.values())
    measured = ["--question-answering", str(SQUAD_V2), "--device", "cpu"]
    assert evaluate.main([str(folder / "best"), *measured]) == 0
    figures = json.loads((folder / "best" / "evaluation.json").read_text())
    assert figures["question_answering_best_f1"] == pytest.approx(values[best], abs=1e-4)


@pytest.mark.parametrize(
    ("metric", "values", "best_steps"),
    [
        ("accuracy", [0.5, 0.7, 0.7, 0.6, 0.8], [1, 2, 2, 2, 5]),
        ("loss", [0.5, 0.7, 0.4, 0.4], [1, 1, 3, 3]),
        ("mse", [0.5, 0.7], [1, 1]),
        ("pearson", [math.nan, -0.1, math.nan, 0.1], [None, 2, 2, 4]),
    ],
)
def test_the_first_of_the_best(
    metric: str, values: list[float], best_steps: list[int | None]
) -> None:
    """And patience is at its end after two validations that are not better."""
    selected = BestValidation(metric=metric, patience=2)
    for step, (value, expected) in enumerate(zip(values, best_steps, strict=True), start=1):
        is_best = selected.update(step, {metric: value, "other": 9.0})
        assert selected.best_step == expected
        assert is_best == (expected == step)
        assert selected.stops_early == (step - (expected or 0) >= 2)


def test_patience_ends_a_run_and_a_larger_one_goes_on(tmp_path: Path, capsys: Capture) -> None:
    """The best weights stay, however many checkpoints come after; the end is validated once."""
    stub = Stub(accuracies={2: 0.5, 3: 0.75, 8: 0.875})
    options: dict[str, Any] = {"num_steps": 10, "validate_every": 1, "keep": 1}
    trained = train(tmp_path, stub, selection=selection(2), **options)
    assert (trained.status, trained.num_steps, trained.best) == (0, 2, tmp_path / "best")
    said = "".join(capsys.readouterr())
    assert "Stopped early at 20.0%, after 2 validations without a better one. To cont" in said
    assert "/best: accuracy 0.5000, of the weights before the first step" in said
    assert best_step(tmp_path) == 0
    trained = train(tmp_path, stub, selection=selection(3), **options)
    assert (trained.num_steps, best_step(tmp_path)) == (6, 3)
    assert "Stopped early at 60.0%" in "".join(capsys.readouterr())
    train(tmp_path, stub, **options)  # without selection: the best stays
    assert best_step(tmp_path) == 3
    trained = train(tmp_path, stub, selection=selection(9), **options | {"num_steps": 11})
    said = "".join(capsys.readouterr())
    assert "/best: accuracy 0.7500 at step 3.\n" in said
    assert "Stopped early" not in said
    assert list(validations(tmp_path, TASK, "accuracy")) == list(range(12))
    with pytest.raises(RunError, match="by accuracy of these, not accuracy of those"):
        train(tmp_path, stub, selection=selection(3, "accuracy of those"), **options)


@pytest.mark.parametrize("end", [{"num_steps": 3}, {"num_steps": None, "budget_s": 1.5}])
def test_the_end_is_validated_also_where_its_step_was_skipped(
    tmp_path: Path, end: dict[str, Any]
) -> None:
    """A run that is shorter than the time between validations has a best checkpoint."""
    train(
        tmp_path,
        Stub(spoiled={3}, accuracies={3: 0.6}),
        validate_every=3,
        selection=selection(),
        **end,
    )
    assert list(validations(tmp_path, TASK, "accuracy")) == [0, 3]
    assert best_step(tmp_path) == 3


@pytest.mark.parametrize("happens", [kill, stop], ids=["killed", "stopped"])
@pytest.mark.parametrize("step", [2, 5])
def test_a_run_that_ends_in_a_validation_goes_on_as_one_that_does_not(
    tmp_path: Path, happens: Callable[[], None], step: int
) -> None:
    """In its last one, too. What was validated is not validated again."""
    accuracies = {0: 0.6, 2: 0.7, 4: 0.6, 5: 0.8}
    options: dict[str, Any] = {"num_steps": 5, "validate_every": 2, "save_every": 0.0}
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    train(whole, Stub(accuracies=accuracies), selection=selection(), **options)
    stub = Stub(accuracies=accuracies, in_validation={step: happens})
    if happens is kill:
        with pytest.raises(Killed):
            train(ended, stub, selection=selection(), **options)
    else:
        assert train(ended, stub, selection=selection(), **options).status == 143
    assert best_step(ended) == (0 if step == 2 else 2)
    train(ended, Stub(accuracies=accuracies), selection=selection(), **options)
    assert same_weights(ended, whole)
    assert best_step(ended) == best_step(whole) == 5
    assert (
        validations(ended, TASK, "accuracy") == validations(whole, TASK, "accuracy") == accuracies
    )
    before = file_contents(ended / "checkpoints")
    again = Stub(accuracies=accuracies, in_validation={5: kill})
    assert train(ended, again, selection=selection(), **options).status == 0
    assert file_contents(ended / "checkpoints") == before
