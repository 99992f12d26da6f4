"""The weights that a run ends with are validated, once, however it comes to its end."""

from __future__ import annotations

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
    best_step,
    file_contents,
    read_metrics,
    run_command,
    same_weights,
    validations,
)
from training.commands import evaluate
from training.commands.finetune import main
from training.loop.checkpointing import load_state

TASK = "text-classification"
run = partial(run_command, main)
apart = partial(run_in_process, program="training.commands.finetune")


@pytest.fixture
def seven(classifier: Path, labelled: Path) -> list[str]:
    """A run of seven steps, nearly four epochs; the interval of validation is left to be given."""
    return [
        *("--initialize-from", str(classifier), "--length", "64"),
        *("--text-classification", str(labelled), "--validation", str(labelled)),
        *("--labels", "negative", "positive"),
        *("--batch-size", "20", "--steps", "7", "--lr", "5e-3", "--adamw-lr", "1e-2"),
        *("--precision", "fp32", "--device", "cpu", "--metric", "loss", "--keep", "1"),
    ]


def test_the_end_is_validated_also_where_its_step_was_skipped(
    seven: list[str], tmp_path: Path
) -> None:
    options = [*seven, "--steps", "4", "--validate-every", "4"]
    assert apart(options, tmp_path / "run", fate=partial(spoil, {4})).status == 0
    assert list(validations(tmp_path / "run", TASK, "loss")) == [4]
    assert best_step(tmp_path / "run") == 4


@pytest.mark.parametrize("more", [["--steps", "1"], ["--budget", "1s"]], ids=lambda m: m[0])
def test_a_run_that_is_shorter_than_an_epoch_has_a_best_checkpoint(
    seven: list[str], labelled: Path, tmp_path: Path, more: list[str]
) -> None:
    """By its steps, and by its seconds."""
    fate = partial(count_time, 1.0)
    assert apart([*seven, *more], tmp_path / "run", fate=fate).status == 0
    assert list(validations(tmp_path / "run", TASK, "loss")) == [1]
    assert best_step(tmp_path / "run") == 1
    best = str(tmp_path / "run" / "best")
    assert evaluate.main([best, "--text-classification", str(labelled)]) == 0


def test_a_finished_run_is_not_validated_again(seven: list[str], tmp_path: Path) -> None:
    options = [*seven, "--validate-every", "2"]
    assert run(options, tmp_path / "run") == 0
    before = contents(tmp_path / "run")
    assert apart(options, tmp_path / "run", fate=partial(in_validation, die)).status == 0
    assert contents(tmp_path / "run") == before


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
    state = load_state(ended / "checkpoint")
    assert (state["validated_step"], state["selection"]["best_step"]) == (2, 2)


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
