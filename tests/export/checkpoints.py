"""Tiny checkpoints to export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, models

from albert_serve.config import AlbertConfig
from tests.training import support
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks, Task, head_sizes

ALL_TASKS: Final[tuple[Task, ...]] = (
    "fill-mask", "sentence-order", "text-classification", "question-answering",
)  # fmt: skip
TINY: Final = replace(support.TINY, max_positions=30)


def write_tokenizer(folder: Path, num_pieces: int = 20) -> None:
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *(f"▁{i}" for i in range(num_pieces - len(special)))]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 1, False))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_checkpoint(
    folder: Path, config: AlbertConfig = TINY, tasks: tuple[Task, ...] = ALL_TASKS
) -> AlbertForTasks:
    """Write a checkpoint with random weights; return its model."""
    model = AlbertForTasks(config, head_sizes(config, tasks))
    support.randomize(model, seed=0)
    save_checkpoint(model.eval(), folder)
    write_tokenizer(folder)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
