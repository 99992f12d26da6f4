"""Hyperparameters of finetuning: the package's own, and the paper's for each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from albert_serve.config import AlbertConfig
from training.data.labelled.folders import RACE
from training.glue.tasks import TASKS
from training.model.checkpoint import read_config
from training.optim.optimizers import Hyperparameters
from training.options.config import Optimization

# The keys are the names of the flags.
DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "length": 128,
        "batch_size": (32,),
        "optimizer": "adamw",
        "adamw_lr": 3e-4,
        "weight_decay": 0.01,
        "schedule": "wsd",
        "warmup": 0.05,
        "decay": 0.6,
        "sentence_weight": 0.1,
        "clip_norm": 1.0,
        "seed": 0,
    }
)
# The default learning rate decreases for hidden sizes above this one, as published rates do.
_DEFAULT_LR: Final = 2e-4
_DEFAULT_LR_WIDTH: Final = 384
LR_HELP: Final = (
    f"{_DEFAULT_LR:g} up to hidden size {_DEFAULT_LR_WIDTH}; above, it decreases in proportion"
)


def hyperparameters_of(config: Optimization, folder: Path) -> Hyperparameters:
    """Return a finetuning run's hyperparameters, with one learning rate for all parameters."""
    names = [field.name for field in fields(Hyperparameters) if field.name != "pooled_factor"]
    values: dict[str, Any] = {name: getattr(config, name) for name in names}
    if config.lr is None:
        values["lr"] = _DEFAULT_LR * min(
            1.0, _DEFAULT_LR_WIDTH / AlbertConfig.from_hf(read_config(folder)).hidden_size
        )
    return Hyperparameters(**values, pooled_factor=1.0)


# In SQuAD 1, every question has an answer. In SQuAD 2, some have none.
SQUAD_1: Final = "squad1"
SQUAD_2: Final = "squad2"


def _paper(
    lr: float, batch_size: int, dropout: float, num_steps: int, warmup_steps: int, length: int = 512
) -> Mapping[str, Any]:
    """Return a row of table 14 by flag name, with the other defaults of `run_classifier`."""
    return MappingProxyType(
        {
            "length": length,
            "batch_size": (batch_size,),
            "steps": num_steps,
            "warmup": warmup_steps / num_steps,
            "dropout": dropout,
            "classifier_dropout": 0.1,
            "lr": lr,
            "optimizer": "adamw",
            "schedule": "linear",
            "weight_decay": 0.01,
            "clip_norm": 1.0,
        }
    )


# The hyperparameters of each task in the paper (arXiv 1909.11942, table 14).
PAPER: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "cola": _paper(lr=1e-5, batch_size=16, dropout=0.0, num_steps=5336, warmup_steps=320),
        "stsb": _paper(lr=2e-5, batch_size=16, dropout=0.0, num_steps=3598, warmup_steps=214),
        "sst2": _paper(lr=1e-5, batch_size=32, dropout=0.0, num_steps=20935, warmup_steps=1256),
        "mnli": _paper(lr=3e-5, batch_size=128, dropout=0.0, num_steps=10000, warmup_steps=1000),
        "qnli": _paper(lr=1e-5, batch_size=32, dropout=0.0, num_steps=33112, warmup_steps=1986),
        "qqp": _paper(lr=5e-5, batch_size=128, dropout=0.1, num_steps=14000, warmup_steps=1000),
        "rte": _paper(lr=3e-5, batch_size=32, dropout=0.1, num_steps=800, warmup_steps=200),
        "mrpc": _paper(lr=2e-5, batch_size=32, dropout=0.0, num_steps=800, warmup_steps=200),
        RACE: _paper(lr=2e-5, batch_size=32, dropout=0.1, num_steps=12000, warmup_steps=1000),
        "wnli": _paper(lr=2e-5, batch_size=16, dropout=0.1, num_steps=2000, warmup_steps=250),
        SQUAD_1: _paper(
            lr=5e-5, batch_size=48, dropout=0.0, num_steps=3649, warmup_steps=365, length=384
        ),
        SQUAD_2: _paper(lr=3e-5, batch_size=48, dropout=0.0, num_steps=8144, warmup_steps=814),
    }
)
assert PAPER.keys() == TASKS.keys() | {RACE, SQUAD_1, SQUAD_2}
