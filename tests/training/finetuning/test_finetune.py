"""Several tasks are learnt into one set of weights, and a stopped run goes on exactly."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.training.processes import before_step, die, run_in_process
from tests.training.support import (
    read_metrics,
    run_command,
    same_weights,
)
from training.commands.finetune import main
from training.model.checkpoint import load_checkpoint, read_config

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)

PROGRAM = "training.commands.finetune"


def test_all_tasks_are_in_one_checkpoint(finetuned: Path, pretrained: Path) -> None:
    model = load_checkpoint(finetuned / "checkpoint")
    assert model.tasks == {
        "fill-mask": 800,
        "sentence-order": 2,
        "text-classification": 2,
        "question-answering": 2,
    }
    config = read_config(finetuned / "checkpoint")
    assert config["id2label"] == {"0": "negative", "1": "positive"}
    assert config["label2id"] == {"negative": 0, "positive": 1}
    assert len(config["architectures"]) == 3
    for name in ("tokenizer.json", "spiece.model"):
        ours = (finetuned / "checkpoint" / name).read_bytes()
        assert ours == (pretrained / "checkpoint" / name).read_bytes()
    first, second = json.loads((finetuned / "checkpoint/training.json").read_text())["stages"]
    assert first["program"] == "albert-serve pretrain"
    assert second["program"] == "albert-serve finetune"
    assert second["settings"]["question_answering"] == ["squad.json"]
    names = {name for line in read_metrics(finetuned) for name in line}
    assert {f"{task}/loss" for task in model.tasks} <= names


def test_a_run_that_is_killed_goes_on_to_the_same_weights(
    finetuned: Path, finetune_options: list[str], tmp_path: Path
) -> None:
    """Again and again, with checkpoints between its deaths and without."""
    apart = partial(run_in_process, finetune_options, tmp_path / "run", program=PROGRAM)
    for step, saving in ((4, "10h"), (9, "0.0001s"), (9, "10h"), (30, "0.0001s")):
        ended = apart("--save-every", saving, fate=partial(before_step, step, die))
        assert ended.status == -signal.SIGKILL
    assert apart().status == 0
    assert same_weights(tmp_path / "run", finetuned)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [10, 20, 30, 40]


@pytest.mark.slow
def test_a_compiled_run_has_the_same_losses(finetune_options: list[str], tmp_path: Path) -> None:
    """Whatever the number of packed rows; sums differ in their last digits."""
    runs = []
    for choice in ("--no-compile", "--compile"):
        folder = tmp_path / choice
        command = [sys.executable, "-m", PROGRAM, *finetune_options, choice]
        command += ["--output", str(folder)]
        command += ["--steps", "9", "--lr", "1e-3", "--adamw-lr", "1e-3", "--report-every", "1"]
        command += ["--dropout", "0", "--classifier-dropout", "0"]  # drawn otherwise when compiled
        printed = subprocess.run(command, check=True, timeout=900, capture_output=True, text=True)
        says = "Compiled and trained the first step" in printed.stdout + printed.stderr
        assert says is (choice == "--compile")
        runs.append(read_metrics(folder))
    assert len(runs[0]) == len(runs[1]) == 9
    for plain, compiled in zip(*runs, strict=True):
        losses = {name: value for name, value in plain.items() if name.endswith("/loss")}
        assert losses
        assert {name: compiled[name] for name in losses} == pytest.approx(losses, rel=0.01)


def test_tasks_are_drawn_by_their_weights_and_pairs_by_their_share(
    finetune_options: list[str], tmp_path: Path
) -> None:
    more = ("--weights", "1", "1e-9", "6", "--order-share", "0.7", "--steps", "160")
    assert run(finetune_options, tmp_path, *more) == 0
    lines = read_metrics(tmp_path)
    assert not any("question-answering/loss" in line for line in lines)
    first, *_, last = (line for line in lines if "paired-order/loss" in line)
    assert last["paired-order/loss"] < 0.9 * first["paired-order/loss"]
    assert last["sentence-order/loss"] < first["sentence-order/loss"]
    *_, stage = json.loads((tmp_path / "checkpoint" / "training.json").read_text())["stages"]
    assert stage["settings"]["order_share"] == "0.7"
    assert stage["settings"]["sentence_weight"] == "1.0"
