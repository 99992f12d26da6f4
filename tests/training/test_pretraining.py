"""Recipes have the values of the papers; a run of pretraining learns and writes a checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from albert_serve.config import preset
from tests.training.support import (
    REPOSITORY,
    hf_load,
    read_metrics,
    run_command,
    same_weights,
    startup_error,
)
from training.commands.pretrain import PretrainConfig, main
from training.data.masking import NgramMasking
from training.data.shards import Shards
from training.model.checkpoint import load_checkpoint, read_weights
from training.model.provenance import read_stages
from training.pretraining.job import num_steps
from training.pretraining.recipes import RECIPES
from training.tasks.pretraining.metrics import unigram_entropy

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]
run = partial(run_command, main)
PAPER, SMALL = RECIPES["paper"], RECIPES["small"]


def test_the_paper_recipe_has_the_values_of_the_paper() -> None:
    """If Lan et al. 2019 do not state a value, it is the default of google-research/ALBERT."""
    expected = {
        "length": 512,  # section 4.1: the maximum input length
        "batch_size": 4096,  # section 4.1
        "num_steps": 125_000,  # section 4.1
        "optimizer": "lamb",  # section 4.1
        "lr": 0.00176,  # section 4.1
        "pooled_factor": 1.0,  # one learning rate for all weights
        "weight_decay": 0.01,  # optimization.py, create_optimizer
        "schedule": "linear",  # optimization.py, polynomial decay of power 1 to 0
        "warmup": 3125 / 125_000,  # run_pretraining.py, num_warmup_steps
        "mask_rate": 0.15,  # create_pretraining_data.py, masked_lm_prob
        "sentence_task": "sop",  # section 3.1
        "sentence_weight": 1.0,  # run_pretraining.py: the sum of both losses
        "short_rate": 0.1,  # section 4.1: 10 % of the inputs are shorter
        "clip_norm": 1.0,  # optimization.py
        "start": "random",  # modeling.py: truncated normal of 0.02
        "dropout": "v1",  # the models of Table 1; section 4.8 removes it
        "order_share": 0.0,  # masked rows also train sentence order
    }
    assert {name: getattr(PAPER, name) for name in expected} == expected
    assert NgramMasking(word_starts=np.zeros(1, bool)).max_words == 3  # section 4.1
    # The decay starts at step 0, so the rate is at most 0.975 of the peak (optimization.py).
    rates = [PAPER.rate_schedule.factor(step / 125_000) for step in (0, 3124, 3125, 125_000)]
    assert rates == pytest.approx([0.0, 3124 / 3125, 0.975, 0.0])
    # v1 has dropout except in xxlarge; v2 does not (README of google-research/ALBERT).
    sizes = [preset(name) for name in ("base", "large", "xlarge", "xxlarge")]
    assert [PAPER.dropout_of(size) for size in sizes] == [0.1, 0.1, 0.1, 0.0]
    assert {replace(PAPER, dropout="v2").dropout_of(size) for size in sizes} == {0.0}


def test_the_small_recipe_has_its_documented_values() -> None:
    """The documents are docs/pretraining.md and docs/decisions.md."""
    assert (SMALL.batch_size, SMALL.length, SMALL.num_steps) == (32, 128, None)
    assert (SMALL.optimizer, SMALL.pooled_factor) == ("muon", 0.1)
    assert (SMALL.lr, SMALL.adamw_lr) == (1e-3, 3e-3)
    assert (SMALL.schedule, SMALL.warmup, SMALL.decay) == ("wsd", 0.03, 0.3)
    assert (SMALL.mask_rate, SMALL.sentence_weight, SMALL.weight_decay) == (0.2, 0.1, 0.01)
    assert (SMALL.start, SMALL.dropout, SMALL.short_rate) == ("local", "v2", 0.1)


def make_config(**values: Any) -> PretrainConfig:
    paths = dict.fromkeys(("output", "shards", "tokenizer"), Path("unused"))
    return PretrainConfig(**{**paths, "device": "cpu", "steps": 32, **values})


def test_options_change_a_recipe() -> None:
    """The learning rate of LAMB scales with the root of the batch (You et al. 2019, section 4)."""
    for batch_size, lr in ((1024, 0.00088), (4096, 0.00176), (16384, 0.00352)):
        assert make_config(batch_size=batch_size).changed(PAPER).lr == pytest.approx(lr)
    assert make_config(batch_size=1024, lr=0.1).changed(PAPER).lr == 0.1
    adamw = make_config(batch_size=1024, optimizer="adamw").changed(PAPER)
    assert adamw == replace(PAPER, batch_size=1024, optimizer="adamw")
    assert make_config(batch_size=64).changed(SMALL) == replace(SMALL, batch_size=64)
    paired = make_config(order_share=0.5).changed(SMALL)
    assert paired == replace(SMALL, order_share=0.5, sentence_task="none", sentence_weight=1.0)
    weighted = make_config(order_share=0.5, sentence_weight=0.3).changed(SMALL)
    assert weighted.sentence_weight == 0.3
    limits = ({"steps": 7}, {"steps": None, "recipe": "paper"}, {"steps": None, "budget": 60.0})
    configs = [make_config(**limit) for limit in limits]
    assert [num_steps(config, PAPER) for config in configs] == [7, 125_000, None]


def test_the_loss_falls_below_the_unigram_entropy(pretrained_run: Path) -> None:
    entropy = unigram_entropy(Shards.open(pretrained_run / "shards"), 800)
    metrics = read_metrics(pretrained_run)
    assert [line["step"] for line in metrics] == list(range(5, 81, 5))
    assert metrics[0]["fill-mask/loss"] > 0.9 * entropy
    assert sum(line["fill-mask/loss"] for line in metrics[-5:]) / 5 < 0.9 * entropy
    assert metrics[-1]["fill-mask/accuracy"] > 0.2
    assert metrics[-1]["tokens"] > metrics[0]["tokens"] > 0
    assert all(line["tokens_per_s"] > 0 for line in metrics)
    assert metrics[0]["lr_factor"] == pytest.approx(1.0)
    assert 0 < metrics[-1]["lr_factor"] < 0.3


def test_the_checkpoint_loads_in_transformers_and_records_its_stage(pretrained_run: Path) -> None:
    folder = pretrained_run / "checkpoint"
    model = hf_load("AlbertForPreTraining", folder)
    inputs = transformers.AutoTokenizer.from_pretrained(folder)("The school", return_tensors="pt")
    with torch.no_grad():
        assert model(**inputs).prediction_logits.isfinite().all()
    assert load_checkpoint(folder).tasks == {"fill-mask": 800, "sentence-order": 2}
    (stage,) = read_stages(folder)
    assert (stage["program"], stage["corpus"]) == ("albert-serve pretrain", ["easy.txt"])
    assert (stage["steps"], stage["settings"]["batch_size"]) == (80, 16)
    assert stage["tokens"] == read_metrics(pretrained_run)[-1]["tokens"]
    assert str(REPOSITORY) not in json.dumps(stage)


def test_a_run_learns_sentence_order_next_to_masked_tokens(
    pretrain_options: list[str], tmp_path: Path
) -> None:
    """Half of the steps train pairs. The sentences of the corpus always have the same order."""
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


def test_a_run_starts_from_a_checkpoint_with_more_layers_of_shared_weights(
    tiny_run: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    shutil.copytree(tiny_run / "checkpoint", tmp_path / "deep")
    config = json.loads((tmp_path / "deep" / "config.json").read_text())
    (tmp_path / "deep" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    options = [*tiny_options, "--initialize-from", str(tmp_path / "deep"), "--layers", "6"]
    tokenizer = options.index("--tokenizer")
    del options[tokenizer : tokenizer + 2]  # the default is the checkpoint's
    assert run(options, tmp_path / "run", "--keep", "9") == 0
    first, last = (tmp_path / "run" / "checkpoints" / f"step-0000000{step}" for step in (0, 8))
    weights = read_weights(tiny_run / "checkpoint")
    for name, tensor in read_weights(first).items():
        assert tensor.equal(weights[name]), name
    assert load_checkpoint(last).config.num_layers == 6
    assert load_checkpoint(last).config.hidden_dropout == 0.1
    assert [stage["steps"] for stage in read_stages(last)] == [8, 8]


@pytest.mark.extended
def test_validation_on_files_or_shards_does_not_change_the_weights(
    pretrained_run: Path, pretrain_options: list[str], easy_corpus: Path, tmp_path: Path
) -> None:
    name, runs = "validation/fill-mask/loss", []
    for folder, held_out in (("files", easy_corpus), ("shards", pretrained_run / "shards")):
        validation = ("--validation", str(held_out), "--validate-every", "40")
        assert run(pretrain_options, tmp_path / folder, *validation) == 0
        assert same_weights(tmp_path / folder, pretrained_run)
        lines = [line for line in read_metrics(tmp_path / folder) if name in line]
        runs.append([{**line, "elapsed_s": 0} for line in lines])
    assert runs[0] == runs[1]
    assert [line["step"] for line in runs[0]] == [40, 80]
    assert runs[0][1][name] < runs[0][0][name]


def test_the_folder_of_another_run_is_rejected_and_unchanged(
    pretrained_run: Path, pretrain_options: list[str], capsys: Capture
) -> None:
    times = {file: file.stat().st_mtime_ns for file in pretrained_run.rglob("*")}
    assert run(pretrain_options, pretrained_run, "--batch-size", "8") == 1
    message = f"error: {pretrained_run} contains a run with batch_size 16, not 8"
    assert message in capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in pretrained_run.rglob("*")} == times


def test_impossible_options_print_one_line_and_start_no_run(
    pretrained_run: Path, pretrain_options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    initialize = f"--initialize-from {pretrained_run / 'checkpoint'}"
    tokenizer = REPOSITORY / "albert_serve/models/albert-small-en"
    for words, message in (
        ("--length 65", "--length 65 is not between 8 and the model's 64 positions"),
        (f"{initialize} --hidden-size 64", "hidden_size 64 is not the size of"),
        (f"{initialize} --tokenizer {tokenizer}", "has 800 tokens, but --tokenizer has"),
        (f"{initialize} --preset base", "--preset cannot be combined with --init"),
    ):
        assert run([*pretrain_options, *words.split()], tmp_path / "run") == 1
        assert message in startup_error(capsys, tmp_path / "run")
