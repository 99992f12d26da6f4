"""Pretraining learns, and a run that was stopped anywhere ends as one that was not."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from tests.training.support import (
    REPOSITORY,
    SQUAD,
    hf_load,
    read_metrics,
    refusal,
    run_command,
    same_weights,
)
from training.commands.pretrain import main
from training.data.shards import Shards
from training.model.checkpoint import load_checkpoint, read_weights
from training.model.provenance import read_stages
from training.tasks.pretraining.metrics import unigram_entropy

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)


def test_the_loss_falls_below_the_unigram_entropy(pretrained: Path) -> None:
    entropy = unigram_entropy(Shards.open(pretrained / "shards"), 800)
    metrics = read_metrics(pretrained)
    assert [line["step"] for line in metrics] == list(range(5, 81, 5))
    assert metrics[0]["fill-mask/loss"] > 0.9 * entropy
    assert sum(line["fill-mask/loss"] for line in metrics[-5:]) / 5 < 0.9 * entropy
    assert metrics[-1]["fill-mask/accuracy"] > 0.2
    assert metrics[-1]["tokens"] > metrics[0]["tokens"] > 0
    assert all(line["tokens_per_s"] > 0 for line in metrics)
    assert metrics[0]["lr_factor"] == pytest.approx(1.0)
    assert 0 < metrics[-1]["lr_factor"] < 0.3


def test_the_checkpoint_is_one_of_transformers_and_says_where_it_comes_from(
    pretrained: Path,
) -> None:
    folder = pretrained / "checkpoint"
    model = hf_load("AlbertForPreTraining", folder)
    inputs = transformers.AutoTokenizer.from_pretrained(folder)("The school", return_tensors="pt")
    with torch.no_grad():
        assert model(**inputs).prediction_logits.isfinite().all()
    assert load_checkpoint(folder).tasks == {"fill-mask": 800, "sentence-order": 2}
    (stage,) = read_stages(folder)
    assert stage["program"] == "albert-serve pretrain"
    assert stage["corpus"] == ["easy.txt"]
    assert (stage["steps"], stage["settings"]["batch_size"]) == (80, 16)
    assert stage["tokens"] == read_metrics(pretrained)[-1]["tokens"]
    assert str(REPOSITORY) not in json.dumps(stage)


def test_order_is_learned_beside_masked_tokens(pretrain_options: list[str], tmp_path: Path) -> None:
    """Half of the steps are on pairs; an easy corpus: its sentences follow each other alike."""
    share = ("--order-share", "0.5", "--order-length", "64", "--order-batch-size", "8")
    assert run(pretrain_options, tmp_path, *share, "--steps", "160") == 0
    metrics = read_metrics(tmp_path)
    assert sum(line["paired-order/accuracy"] for line in metrics[-5:]) / 5 > 0.8
    assert sum(line["paired-order/loss"] for line in metrics[-5:]) / 5 < 0.55
    assert metrics[-1]["sentence-order/loss"] < 0.6
    assert metrics[-1]["fill-mask/loss"] < metrics[0]["fill-mask/loss"] - 0.3
    folder = tmp_path / "checkpoint"
    assert load_checkpoint(folder).tasks == {"fill-mask": 800, "sentence-order": 2}
    assert json.loads((folder / "config.json").read_text())["albert_sentence_task"] == "sop"
    (stage,) = read_stages(folder)
    assert (stage["settings"]["order_share"], stage["settings"]["sentence_task"]) == (0.5, "none")


def test_a_run_begins_with_the_weights_of_a_checkpoint_whose_config_has_more_layers(
    tiny: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    shutil.copytree(tiny / "checkpoint", tmp_path / "deep")
    config = json.loads((tmp_path / "deep" / "config.json").read_text())
    (tmp_path / "deep" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    options = [*tiny_options, "--initialize-from", str(tmp_path / "deep"), "--layers", "6"]
    assert run(options, tmp_path / "run", "--keep", "9") == 0
    first, last = (tmp_path / "run" / "checkpoints" / f"step-0000000{step}" for step in (0, 8))
    weights = read_weights(tiny / "checkpoint")
    for name, tensor in read_weights(first).items():
        assert tensor.equal(weights[name]), name
    assert load_checkpoint(last).config.num_layers == 6
    assert load_checkpoint(last).config.hidden_dropout == 0.1
    assert [stage["steps"] for stage in read_stages(last)] == [8, 8]


@pytest.mark.extended
def test_text_is_held_out_as_files_or_as_shards(
    pretrained: Path, pretrain_options: list[str], easy_corpus: Path, tmp_path: Path
) -> None:
    """The run ends with the same weights as without."""
    runs = {"files": easy_corpus, "shards": pretrained / "shards"}
    for name, arguments in runs.items():
        more = ("--validation", str(arguments), "--validate-every", "40")
        assert run(pretrain_options, tmp_path / name, *more) == 0
        assert same_weights(tmp_path / name, pretrained)
    ours, theirs = (
        [line for line in read_metrics(tmp_path / name) if "validation/fill-mask/loss" in line]
        for name in runs
    )
    assert [line["step"] for line in ours] == [40, 80]
    for one, other in zip(ours, theirs, strict=True):
        for name in one.keys() - {"elapsed_s"}:
            assert one[name] == other[name]
    assert ours[1]["validation/fill-mask/loss"] < ours[0]["validation/fill-mask/loss"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--batch-size", "8"], "batch_size 16, not 8"),
        (["--sharing", "ffn"], "albert_sharing 'all', not 'ffn'"),
        (["--corpus", str(SQUAD)], "corpus [['easy.txt', "),
    ],
)
def test_other_options_on_a_run_are_refused(
    pretrained: Path, pretrain_options: list[str], changes: list[str], message: str, capsys: Capture
) -> None:
    before = {file: file.stat().st_mtime_ns for file in pretrained.rglob("*")}
    assert run(pretrain_options, pretrained, *changes) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {pretrained} holds a run with {message}")
    assert error.endswith(". Give the same options to resume it, or another --output\n")
    assert {file: file.stat().st_mtime_ns for file in pretrained.rglob("*")} == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokenizer nowhere", "nowhere/tokenizer.json cannot be read: No such file"),
        ("--length 65", "--length 65: a sequence has from 8 tokens to the model's 64 positions"),
        ("--order-share 0.2 --order-length 65", "--order-length 65: a sequence has from 8"),
        ("--heads 5", "hidden_size 32 is not a multiple of num_heads 5"),
        ("--initialize-from {start} --hidden-size 64", "hidden_size 64: "),
        ("--initialize-from {start} --preset base", "--preset goes with new weights; --initialize"),
        ("--initialize-from {start} --layers 1", "num_layers 1: "),
    ],
)
def test_impossible_options_are_one_line_and_no_run(
    pretrained: Path,
    pretrain_options: list[str],
    tmp_path: Path,
    words: str,
    message: str,
    capsys: Capture,
) -> None:
    folder = tmp_path / "run"
    more = words.format(start=pretrained / "checkpoint").split()
    assert run([*pretrain_options, *more], folder) == 1
    assert message in refusal(capsys, folder)
