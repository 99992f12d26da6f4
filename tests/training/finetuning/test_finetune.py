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
    refusal,
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
        says = "compiled, and trained the first step" in printed.stdout + printed.stderr
        assert says is (choice == "--compile")
        runs.append(read_metrics(folder))
    assert len(runs[0]) == len(runs[1]) == 9
    for plain, compiled in zip(*runs, strict=True):
        losses = {name: value for name, value in plain.items() if name.endswith("/loss")}
        assert losses
        assert {name: compiled[name] for name in losses} == pytest.approx(losses, rel=0.01)


def test_compilation_without_a_compiler_is_refused(
    finetune_options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run(finetune_options, tmp_path / "run", "--compile") == 1
    assert "there is no no-such-compiler" in refusal(capsys, tmp_path / "run")


def test_epochs_end_a_run_and_validation_reports_each(
    pretrained: Path, labelled: Path, tmp_path: Path, capsys: Capture
) -> None:
    options = [
        *("--initialize-from", str(pretrained / "checkpoint"), "--length", "64"),
        *("--text-classification", str(labelled), "--batch-size", "20", "--epochs", "3"),
        *("--lr", "1e-2", "--adamw-lr", "1e-2", "--device", "cpu", "--validation", str(labelled)),
    ]
    assert run(options, tmp_path) == 0
    num_texts = len(labelled.read_text().splitlines()) - 1
    steps_an_epoch = -(-num_texts // 20)
    said = capsys.readouterr()
    assert f"{3 * steps_an_epoch:,} steps" in said.out
    figures = [
        line for line in read_metrics(tmp_path) if "validation/text-classification/loss" in line
    ]
    assert [line["step"] for line in figures] == [steps_an_epoch * n for n in (0, 1, 2, 3)]
    losses = [line["validation/text-classification/loss"] for line in figures]
    assert losses[3] < losses[1]


def test_weights_say_how_often_each_task_is_drawn(
    finetune_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    assert run(finetune_options, tmp_path, "--weights", "1", "1", "1e-9", "--steps", "6") == 0
    assert "pretraining" not in capsys.readouterr().out


def test_an_answer_that_stands_elsewhere_is_repaired_and_counted(
    start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    answers = {"text": ["four euros"], "answer_start": [100_000]}
    row = {"id": 1, "context": "It costs four euros.", "question": "How much?", "answers": answers}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    options = [*start, "--question-answering", str(file), "--batch-size", "1", "--steps", "1"]
    assert run(options, tmp_path / "run") == 0
    assert "1 of 1 answers did not stand at their answer_start" in capsys.readouterr().out


def test_pairs_in_both_orders_are_learnt_beside_the_tasks(
    finetune_options: list[str], tmp_path: Path
) -> None:
    more = ("--weights", "1", "1", "6", "--order-share", "0.7", "--steps", "160")
    assert run(finetune_options, tmp_path, *more) == 0
    first, *_, last = (line for line in read_metrics(tmp_path) if "paired-order/loss" in line)
    assert last["paired-order/loss"] < 0.9 * first["paired-order/loss"]
    assert last["sentence-order/loss"] < first["sentence-order/loss"]
    *_, stage = json.loads((tmp_path / "checkpoint" / "training.json").read_text())["stages"]
    assert stage["settings"]["order_share"] == "0.7"
    assert stage["settings"]["sentence_weight"] == "1.0"
