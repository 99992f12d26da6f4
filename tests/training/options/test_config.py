"""Configurations: flags, the Python API, and the records by which runs are resumed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.training.support import REPOSITORY, checkpoint_state, same_weights
from training.commands.distil import DistilConfig
from training.commands.finetune import ClassifierConfig, FinetuneConfig, finetune
from training.commands.pretrain import PretrainConfig, pretrain
from training.errors import TrainingError
from training.finetuning.settings import record_of, settle
from training.options.flags import Options, add_flags, read_flags
from training.options.heads import parse_with_heads, read_heads
from training.pretraining.config import Start, architecture
from training.pretraining.job import run_record
from training.pretraining.recipes import RECIPES

# What run.json held for these options before configurations were dataclasses; of a finetuning run,
# what sets it apart from the first.
RECORDS: Final = json.loads((Path(__file__).parent / "records.json").read_text())


def parsed(config: type[Options], words: str) -> Any:
    parser = argparse.ArgumentParser()
    add_flags(parser, config)
    return read_flags(config, parser.parse_args(words.split()))


def test_a_pretraining_run_of_an_earlier_version_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(REPOSITORY)
    known = RECORDS["pretrain"]
    config = parsed(PretrainConfig, f"{known['options']} --output nowhere")
    recipe = config.changed(RECIPES[config.recipe])
    start = Start(folder=None, name=None, tokenizer=config.tokenizer)
    sizes = architecture(config, recipe, start, start.open_tokenizer())
    assert run_record(config, recipe, sizes) == known["record"]


@pytest.mark.parametrize("name", [name for name in RECORDS if name.startswith("finetune")])
def test_a_finetuning_run_of_an_earlier_version_is_known(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    parser = argparse.ArgumentParser()
    add_flags(parser, FinetuneConfig)
    known = RECORDS[name]
    words = f"--initialize-from models/albert-small-en --output nowhere {known['options']}"
    # Defaults that were others, and come before what the run's own options say.
    earlier = "--validation-split 0 --optimizer muon --lr 5e-4"
    if "--recipe" in words:
        earlier = "--validation-split 0"
    values, heads = parse_with_heads(parser, ClassifierConfig, f"{earlier} {words}".split())
    further = read_heads(ClassifierConfig, heads)
    config = read_flags(FinetuneConfig, values, heads=further)
    record, expected = (
        record_of(settle(config)),
        RECORDS["finetune texts"]["record"] | known["record"],
    )
    assert {key: record[key] for key in expected} == expected


def test_pretraining_from_python_is_that_of_the_command(
    tiny_options: list[str], tiny: Path, tmp_path: Path
) -> None:
    """In a folder that the command could resume."""
    values = dict(zip(tiny_options[0:-1:2], tiny_options[1::2], strict=False))
    trained = pretrain(
        PretrainConfig(
            output=tmp_path,
            shards=Path(values["--shards"]),
            tokenizer=Path(values["--tokenizer"]),
            embedding_size=16,
            hidden_size=16,
            layers=3,
            heads=2,
            max_positions=32,
            length=32,
            dropout="v1",
            batch_size=8,
            micro_batch_size=4,
            steps=8,
            report_every=1,
            compile=False,
            device=torch.device("cpu"),
        )
    )
    assert (trained.status, trained.num_steps) == (0, 8)
    assert trained.checkpoint == tmp_path / "checkpoint"
    assert same_weights(tmp_path, tiny)


def test_finetuning_from_python_returns_the_best_validation(
    pretrained: Path, labelled: Path, tmp_path: Path
) -> None:
    """Paths may be given as text, and tuples as lists."""
    values: dict[str, Any] = {"output": str(tmp_path), "text_classification": [str(labelled)]}
    config = FinetuneConfig(
        initialize_from=str(pretrained / "checkpoint"),
        validation=(labelled,),
        length=64,
        batch_size=(20,),
        lr=1e-2,
        steps=4,
        validate_every=2,
        device=torch.device("cpu"),
        **values,
    )
    trained = finetune(config)
    assert trained.status == 0
    assert trained.selection is not None
    assert trained.selection.best_step in (0, 2, 4)  # 0: the fitted head
    assert checkpoint_state(tmp_path)["step"] == trained.num_steps == 4


def finetuning(**values: Any) -> FinetuneConfig:
    return FinetuneConfig(**{"initialize_from": "x", "output": "runs", "steps": 1, **values})


def pretraining(**values: Any) -> PretrainConfig:
    return PretrainConfig(**{"output": "runs", "corpus": ["a.txt"], "steps": 1, **values})


def distilling(**values: Any) -> DistilConfig:
    return DistilConfig(
        **{"teacher": "bert", "output": "runs", "corpus": ["a.txt"], "steps": 1, **values}
    )


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (finetuning, {"steps": 0}, "--steps: 0 is no whole number from 1"),
        (finetuning, {"lr": -1.0}, "--lr: -1.0 is no number above 0"),
        (finetuning, {"dropout": "high"}, "--dropout: 'high' is no number from 0 to 1"),
        (finetuning, {"validation_split": 1}, "--validation-split: 1 is no number from 0 to below"),
        (finetuning, {"optimizer": "sgd"}, "--optimizer: 'sgd' is none of lamb, adamw, muon"),
        (finetuning, {"batch_size": (0,)}, "--batch-size: 0 is no whole number from 1"),
        (finetuning, {"labels": "good"}, "--labels: 'good' is no list of values"),
        (finetuning, {"truncation": "yes"}, "--truncation: 'yes' is no bool"),
        (finetuning, {"task": "NLI"}, "--task: "),
        (pretraining, {"recipe": "large"}, "--recipe: 'large' is none of paper, small"),
        (pretraining, {"corpus": ()}, "give either --corpus or --shards"),
        (pretraining, {"mask_rate": (0.1, 0.2, 0.3)}, "--mask-rate takes one rate, or the first"),
        (pretraining, {"order_share": 1.0}, "--order-share 1 leaves no step to masked tokens"),
        (pretraining, {"order_share": 0.2, "sentence_task": "sop"}, "train the same head"),
        (pretraining, {"device": "gpu"}, "--device: 'gpu' cannot be used: "),
        (pretraining, {"steps": None}, "a run needs an end: give --steps, --budget or --recipe"),
        (distilling, {"steps": None}, "a run needs an end: give --steps or --budget"),
        (distilling, {"hidden_layers": ("2",)}, "--hidden-layers: '2' is not a pair of layers; w"),
        (
            distilling,
            {"hidden_weight": 0},
            "--hidden-weight 0 ignores the teacher",
        ),
    ],
)
def test_a_configuration_is_checked_however_it_is_made(
    make: Callable[..., Options], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError) as refused:
        make(**values)
    assert message in str(refused.value)


@pytest.mark.parametrize("config", [PretrainConfig, DistilConfig, FinetuneConfig])
def test_the_help_names_every_flag_with_its_default(config: type[Options]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, config)
    help_ = " ".join(parser.format_help().split())
    assert "--keep KEEP checkpoints to keep (2)" in help_
    assert "--precision {auto,fp32,bf16,fp16}" in help_
    if config is FinetuneConfig:
        assert "with muon of the layers' matrices (0.0002; of a hidden size over 384" in help_
