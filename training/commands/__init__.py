"""The commands of this package for `albert-serve`, which finds this table by an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# By name: the module, whose `main` is the command, and its purpose.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "finetune": ("training.commands.finetune", "train a model on labelled data and questions"),
        "evaluate": ("training.commands.evaluate", "measure a checkpoint on held-out data"),
        "vocab": ("training.commands.vocab", "make a vocabulary from text"),
        "prepare": ("training.commands.prepare", "tokenise a corpus once, for all runs on it"),
        "pretrain": ("training.commands.pretrain", "train a model from text"),
        "convert": ("training.commands.convert", "write any ALBERT checkpoint for transformers"),
    }
)
