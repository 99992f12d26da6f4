"""Formats of ALBERT weights, made from a folder that `transformers` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from albert_serve.errors import BundleCorruptError
from training.conversion.source import open_checkpoint
from training.model.checkpoint import CheckpointError, load_checkpoint

Weights = dict[str, Tensor]
Change = Callable[[Path], object]  # changes a checkpoint's folder in place


def take_weights(folder: Path) -> Weights:
    """Return the weights of a folder, and remove their file."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return {name: tensor.clone() for name, tensor in weights.items()}


def as_pickle(folder: Path) -> None:
    torch.save(take_weights(folder), folder / "pytorch_model.bin")


def as_old_pickle(folder: Path) -> None:
    """Write the format of torch before version 1.6, with tied weights twice."""
    weights = take_weights(folder)
    weights["predictions.decoder.weight"] = weights["albert.embeddings.word_embeddings.weight"]
    weights["predictions.decoder.bias"] = weights["predictions.bias"]
    file = folder / "pytorch_model.bin"
    torch.save(weights, file, _use_new_zipfile_serialization=False)


def as_shards(stem: str, suffix: str, save: Callable[[Weights, Path], Any], folder: Path) -> None:
    """Write two shards and their index."""
    weights = take_weights(folder)
    names, half = list(weights), len(weights) // 2
    files: dict[str, str] = {}
    for number, shard in enumerate((names[:half], names[half:]), start=1):
        file = f"{stem}-{number:05}-of-00002{suffix}"
        save({name: weights[name] for name in shard}, folder / file)
        files |= dict.fromkeys(shard, file)
    index = folder / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))


as_pickle_shards: Final = partial(as_shards, "pytorch_model", ".bin", torch.save)


def with_old_names(folder: Path) -> None:
    """Use TensorFlow's names of norms, and add the buffers that old versions stored."""
    weights = {}
    for name, tensor in take_weights(folder).items():
        if "LayerNorm" in name or "layer_norm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        weights[name] = tensor
    weights["albert.embeddings.position_ids"] = torch.arange(16)[None]
    weights["albert.embeddings.token_type_ids"] = torch.zeros(1, 16, dtype=torch.int64)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def without_prefix(folder: Path) -> None:
    """Use the names of a bare `AlbertModel`."""
    bare = {name.removeprefix("albert."): tensor for name, tensor in take_weights(folder).items()}
    torch.save(bare, folder / "pytorch_model.bin")


def with_prefix(prefix: str, folder: Path) -> None:
    """Use the names of a module that contains the model."""
    weights = {prefix + name: tensor for name, tensor in take_weights(folder).items()}
    save_file(weights, folder / "model.safetensors")


def assert_rejected(folder: Path, message: str) -> None:
    """Check that the checkpoint is rejected with this message, which names the folder."""
    rejection = pytest.raises((CheckpointError, BundleCorruptError), match=message)
    with rejection as caught, open_checkpoint(folder) as checkpoint:
        load_checkpoint(checkpoint.folder)
    assert str(folder) in str(caught.value)


FORMATS: Final[dict[str, Change]] = {
    "pickle": as_pickle,
    "pickle before torch 1.6": as_old_pickle,
    "pickle shards": as_pickle_shards,
    "safetensors shards": partial(as_shards, "model", ".safetensors", save_file),
    "old names": with_old_names,
    "no prefix": without_prefix,
    "DataParallel": partial(with_prefix, "module."),
    "Lightning, compiled": partial(with_prefix, "model._orig_mod."),
}
