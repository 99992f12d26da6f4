"""The checkpoint that a finetuning run starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.data.examples import MIN_LENGTH
from training.errors import RunError
from training.finetuning.config import FinetuneConfig
from training.finetuning.recipes import default_rate
from training.model.checkpoint import read_config, read_tasks
from training.model.heads import Task
from training.optim.optimizers import Hyperparameters
from training.options.config import should_compile


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The checkpoint that a run starts from, with the sizes that the run gives its model.

    Attributes:
        hf: content of its `config.json`.
        heads: the outputs of each of its heads.
        architecture: its sizes, perhaps with fewer layers or positions, and other dropout.
        compiles: whether the model and its losses are compiled.
    """

    folder: Path
    hf: Mapping[str, Any]
    heads: Mapping[Task, int]
    architecture: AlbertConfig
    tokenizer: AlbertTokenizer
    compiles: bool

    @classmethod
    def open(cls, folder: Path, config: FinetuneConfig, device: torch.device) -> Self:
        """Read a checkpoint in the standard form, but its weights.

        Raises:
            CheckpointError: it cannot be read.
            RunError: the run's sequences are longer than its positions, or too short.
        """
        compiles = should_compile(config.compile, device)
        hf = read_config(folder)
        return cls(
            folder=folder,
            hf=hf,
            heads=read_tasks(folder),
            architecture=_architecture(config, hf),
            tokenizer=AlbertTokenizer.from_file(folder / "tokenizer.json"),
            compiles=compiles,
        )


def hyperparameters_of(config: FinetuneConfig, folder: Path) -> Hyperparameters:
    """Return the hyperparameters of a run from a checkpoint; all parameters have the same rate."""
    names = [field.name for field in fields(Hyperparameters) if field.name != "pooled_factor"]
    values: dict[str, Any] = {name: getattr(config, name) for name in names}
    if config.lr is None:
        values["lr"] = default_rate(AlbertConfig.from_hf(read_config(folder)).hidden_size)
    return Hyperparameters(**values, pooled_factor=1.0)


def _architecture(config: FinetuneConfig, hf: Mapping[str, Any]) -> AlbertConfig:
    changes: dict[str, Any] = {
        "max_positions": config.max_positions,
        "hidden_dropout": config.dropout,
        "attention_dropout": config.dropout,
        "classifier_dropout": config.classifier_dropout,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    sizes = replace(AlbertConfig.from_hf(hf), **given)
    # Without --length, windows of questions have 384 tokens, or as many as the model has positions.
    has_default = config.has_questions_alone and config.question_length != config.length
    if not has_default and not MIN_LENGTH <= config.length <= sizes.max_positions:
        raise RunError(
            f"--length {config.length}: a sequence has from {MIN_LENGTH} tokens to the model's "
            f"{sizes.max_positions} positions"
        )
    if not MIN_LENGTH <= (config.order_length or MIN_LENGTH) <= sizes.max_positions:
        raise RunError(
            f"--order-length {config.order_length}: a pair has from {MIN_LENGTH} tokens to the "
            f"model's {sizes.max_positions} positions"
        )
    return sizes
