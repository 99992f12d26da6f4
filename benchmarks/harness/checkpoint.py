"""A checkpoint with random weights, which run as fast as trained weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from albert_serve.config import AlbertConfig
from albert_serve.settings import shipped_bundle
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks, Task, head_sizes

_SEED: Final = 0


def make_checkpoint(
    sizes: AlbertConfig, folder: Path, *tasks: Task, tokenizer: Path | None = None
) -> Path:
    """Write a Hugging Face directory with heads for these tasks and a tokenizer.

    The weights have a standard deviation of H^-0.5, which preserves the size of activations. So the
    answers depend on the text. With the usual 0.02, they would hardly depend on it.

    Args:
        tokenizer: folder of the tokenizer, or None for the default model's tokenizer.

    Returns:
        The folder.
    """
    config = replace(sizes, initializer_range=sizes.hidden_size**-0.5)
    torch.manual_seed(_SEED)
    model = AlbertForTasks(config, head_sizes(config, tasks))
    save_checkpoint(model, folder, tokenizer_from=tokenizer or shipped_bundle())
    return folder
