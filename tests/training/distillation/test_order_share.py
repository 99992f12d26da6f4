"""A share of a run's steps learns sentence order, and the run resumes as any other."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.training.support import read_metrics, run_command, same_weights, stop_at
from training.commands import distil, pretrain
from training.model.checkpoint import load_checkpoint

run = partial(run_command, pretrain.main)
SHARE = ("--order-share", "0.5", "--order-length", "64")


@pytest.fixture(scope="module")
def ordered(pretrain_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 160 steps, half of them on pairs. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("ordered") / "run"
    options = [*pretrain_options, *SHARE, "--order-batch-size", "8", "--steps", "160"]
    assert pretrain.main([*options, "--output", str(folder)]) == 0
    return folder


def test_order_is_learned_beside_masked_tokens(ordered: Path) -> None:
    metrics = read_metrics(ordered)
    accuracies = [line["paired-order/accuracy"] for line in metrics[-5:]]
    assert sum(accuracies) / 5 > 0.8  # an easy corpus: its sentences follow each other alike
    losses = [line["paired-order/loss"] for line in metrics[-5:]]
    assert sum(losses) / 5 < 0.55
    assert metrics[-1]["sentence-order/loss"] < 0.6
    assert metrics[-1]["fill-mask/loss"] < metrics[0]["fill-mask/loss"] - 0.3
    folder = ordered / "checkpoint"
    assert load_checkpoint(folder).tasks == {"fill-mask": 800, "sentence-order": 2}
    assert json.loads((folder / "config.json").read_text())["albert_sentence_task"] == "sop"
    (stage,) = json.loads((folder / "training.json").read_text())["stages"]
    assert stage["settings"]["order_share"] == 0.5
    assert stage["settings"]["sentence_task"] == "none"
    assert stage["settings"]["sentence_weight"] == 1.0


def test_a_run_with_a_teacher_that_is_stopped_goes_on_to_the_same_weights(
    distil_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*distil_options, *SHARE, "--steps", "16", "--report-every", "1"]
    assert run_command(distil.main, options, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 9, signal.SIGINT)
        assert run_command(distil.main, options, tmp_path / "stopped") == 128 + signal.SIGINT
    assert run_command(distil.main, options, tmp_path / "stopped") == 0
    assert same_weights(tmp_path / "stopped", tmp_path / "whole")
    metrics = read_metrics(tmp_path / "whole")
    has_order = ["paired-order/loss" in line for line in metrics]
    assert 3 < sum(has_order) < 13
    assert [("fill-mask/loss" in line) for line in metrics] == [not each for each in has_order]
