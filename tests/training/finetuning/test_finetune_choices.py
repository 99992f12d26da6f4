"""Multiple choice is learnt, validated and evaluated; a run that is killed goes on exactly."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.training.support import (
    RACE,
    best_step,
    read_metrics,
    run_command,
    same_weights,
    validations,
)
from training.commands import evaluate
from training.commands.finetune import main
from training.model.checkpoint import read_config

run = partial(run_command, main)


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
    checkpoint = str(tmp_path / "run" / "checkpoint")
    options = ["--multiple-choice", str(RACE / "train"), "--truncation"]
    predictions = tmp_path / "new" / "predictions.json"
    assert evaluate.main([checkpoint, *options, "--predictions", str(predictions)]) == 0
    figures = json.loads((Path(checkpoint) / "evaluation.json").read_text())
    assert figures["multiple_choice_accuracy"] > 0.9
    assert figures["multiple_choice_questions"] == 12
    passages = [json.loads(file.read_text()) for file in (RACE / "train").rglob("*.txt")]
    answers = {
        f"{passage['id']}, question {number}": answer
        for passage in passages
        for number, answer in enumerate(passage["answers"], 1)
    }
    predicted = json.loads(predictions.read_text())
    assert predicted.keys() == answers.keys()
    num_right = sum(predicted[name] == answers[name] for name in answers)
    assert num_right / 12 == figures["multiple_choice_accuracy"]


def test_the_best_checkpoint_has_the_figures_of_its_validation(
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
    assert evaluate.main([str(folder / "best"), "--task", "race", "--data", str(RACE)]) == 0
    figures = json.loads((folder / "best" / "evaluation.json").read_text())
    assert figures["multiple_choice_task"] == "RACE"
    assert figures["multiple_choice_accuracy"] == pytest.approx(measured[best])
    loss = losses(folder)[best]
    assert figures["multiple_choice_loss"] == pytest.approx(loss, rel=1e-3)
    levels = [figures[f"multiple_choice_{level}_accuracy"] for level in ("high", "middle")]
    assert sum(levels) / 2 == pytest.approx(measured[best])
    config = read_config(folder / "best")
    assert "AlbertForMultipleChoice" in config["architectures"]
    assert "id2label" not in config
