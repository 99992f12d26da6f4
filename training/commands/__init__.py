"""The commands of this package for `albert-serve`, which finds this table by an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# By command name: the module whose `main` runs the command, and the command's purpose.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "finetune": ("training.commands.finetune", "train a model on labelled data"),
        "evaluate": ("training.commands.evaluate", "evaluate a checkpoint on held-out data"),
        "vocab": ("training.commands.vocab", "train a vocabulary on text"),
        "prepare": ("training.commands.prepare", "tokenise a corpus for pretraining"),
        "pretrain": ("training.commands.pretrain", "pretrain a model on text"),
        "convert": ("training.commands.convert", "convert a checkpoint for transformers"),
    }
)
