"""Configurations: flags, and the Python API."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.support import same_weights
from training.commands.finetune import FinetuneConfig
from training.commands.pretrain import PretrainConfig, pretrain
from training.errors import TrainingError
from training.options.config import parse_device
from training.options.flags import Options, add_flags


def test_pretraining_from_python_is_that_of_the_command(
    tiny_options: list[str], tiny: Path, tmp_path: Path
) -> None:
    """In a folder that the command could resume."""
    values = dict(zip(tiny_options[0:-1:2], tiny_options[1::2], strict=False))
    options: dict[str, Any] = {
        "embedding_size": 16,
        "hidden_size": 16,
        "layers": 3,
        "heads": 2,
        "max_positions": 32,
        "length": 32,
        "batch_size": 8,
        "micro_batch_size": 4,
        "steps": 8,
        "report_every": 1,
        "dropout": "v1",
        "compile": False,
        "device": "cpu",
        "output": tmp_path,
        **{name: Path(values[f"--{name}"]) for name in ("shards", "tokenizer")},
    }
    config = PretrainConfig(**options)
    trained = pretrain(config)
    assert (trained.status, trained.num_steps) == (0, 8)
    assert trained.checkpoint == tmp_path / "checkpoint"
    assert same_weights(tmp_path, tiny)


def finetuning(**values: Any) -> FinetuneConfig:
    return FinetuneConfig(**{"initialize_from": "x", "output": "runs", "steps": 1, **values})


def pretraining(**values: Any) -> PretrainConfig:
    return PretrainConfig(**{"output": "runs", "corpus": ["a.txt"], "steps": 1, **values})


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (finetuning, {"steps": 0}, "--steps: 0 is no whole number from 1"),
        (finetuning, {"lr": 0.0}, "--lr: 0.0 is no number above 0"),
        (finetuning, {"dropout": "high"}, "--dropout: 'high' is no number from 0 to 1"),
        (finetuning, {"dropout": 1.01}, "--dropout: 1.01 is no number from 0 to 1"),
        (finetuning, {"validation_split": 1}, "--validation-split: 1 is no number from 0 to below"),
        (finetuning, {"optimizer": "sgd"}, "--optimizer: 'sgd' is none of lamb, adamw, muon"),
        (finetuning, {"batch_size": (0,)}, "--batch-size: 0 is no whole number from 1"),
        (finetuning, {"truncation": "yes"}, "--truncation: 'yes' is no bool"),
        (pretraining, {"corpus": ()}, "give either --corpus or --shards"),
        (pretraining, {"order_share": 1.0}, "--order-share 1 leaves no step to masked tokens"),
        (pretraining, {"order_share": 0.2, "sentence_task": "sop"}, "train the same head"),
        (pretraining, {"device": "gpu"}, "--device: 'gpu' cannot be used: "),
        (pretraining, {"steps": None}, "a run needs an end: give --steps, --budget or --recipe"),
    ],
)
def test_a_configuration_is_checked_however_it_is_made(
    make: Callable[..., Options], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError) as refused:
        make(**values)
    assert message in str(refused.value)


def test_the_help_names_every_flag_with_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, FinetuneConfig)
    help_ = " ".join(parser.format_help().split())
    assert "--keep KEEP number of checkpoints to keep (default: 2)" in help_
    assert "--precision {auto,fp32,bf16,fp16}" in help_
    assert "with muon, that of the layers' matrices (default: 0.0002" in help_


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gpu, expected in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert parse_device("auto") == torch.device(expected)


@pytest.mark.parametrize("name", ["cpu:x", "meta", "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give auto, cpu, cuda") as refused:
        parse_device(name)
    assert str(refused.value).startswith(f"{name!r} cannot be used: ")
    assert "\n" not in str(refused.value)
