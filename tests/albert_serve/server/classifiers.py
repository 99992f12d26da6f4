"""A small model of three classifiers of texts, as a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from albert_serve.bundle.manifest import Bundle
from tests.export.exporting import export_bundle
from training.model.checkpoint import load_checkpoint, save_checkpoint
from training.model.heads import AlbertForTasks

# The labels of each; the first is the default one.
LABELS: Final = {
    "sentiment": ["negative", "positive"],
    "rating": ["LABEL_0"],
    "topic": ["sport", "politics", "music"],
}


def head_of(name: str) -> str:
    """The head of a classifier, as the model and the engine call it."""
    return "text-classification" if name == "sentiment" else f"text-classification/{name}"


def classifiers(checkpoint: Path) -> AlbertForTasks:
    """The model of a checkpoint with new classifiers."""
    torch.manual_seed(3)
    heads = {head_of(name): len(labels) for name, labels in LABELS.items()}
    return load_checkpoint(checkpoint, {**load_checkpoint(checkpoint).tasks, **heads}).eval()


def export_classifiers(model: AlbertForTasks, tokenizer_from: Path, folder: Path) -> Bundle:
    """The model's bundle; `config.json` has no labels of `rating`, a regression."""
    records = {
        name: {"id2label": {str(index): label for index, label in enumerate(labels)}}
        for name, labels in LABELS.items()
    }
    extra: dict[str, Any] = {**records["sentiment"], "albert_default_head": "sentiment"}
    extra["albert_heads"] = {"topic": records["topic"]}
    save_checkpoint(model, folder / "checkpoint", tokenizer_from=tokenizer_from, extra_config=extra)
    return export_bundle(folder / "checkpoint", folder / "bundle").bundle
