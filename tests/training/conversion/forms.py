"""The forms in which an ALBERT's weights are found, made of a folder that `transformers` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from albert_serve.errors import BundleCorruptError
from training.conversion.source import open_checkpoint
from training.model.checkpoint import CheckpointError, load_checkpoint

Weights = dict[str, Tensor]
Damage = Callable[[Path], object]  # of a checkpoint's folder


def take_weights(folder: Path) -> Weights:
    """The weights of a folder, whose file is removed."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return {name: tensor.clone() for name, tensor in weights.items()}


def as_pickle(folder: Path) -> None:
    torch.save(take_weights(folder), folder / "pytorch_model.bin")


def as_old_pickle(folder: Path) -> None:
    """As torch wrote it before version 1.6, with tied weights twice."""
    weights = take_weights(folder)
    weights["predictions.decoder.weight"] = weights["albert.embeddings.word_embeddings.weight"]
    weights["predictions.decoder.bias"] = weights["predictions.bias"]
    file = folder / "pytorch_model.bin"
    torch.save(weights, file, _use_new_zipfile_serialization=False)


def as_pickles(folder: Path) -> None:
    names, save = "pytorch_model-{}-of-00002.bin", torch.save
    _as_shards(folder, names, "pytorch_model.bin.index.json", save)


def as_safetensors_shards(folder: Path) -> None:
    names, save = "model-{}-of-00002.safetensors", save_file
    _as_shards(folder, names, "model.safetensors.index.json", save)


def _as_shards(folder: Path, names: str, index: str, save: Callable[[Weights, Path], None]) -> None:
    weights = take_weights(folder)
    half = len(weights) // 2
    places: dict[str, str] = {}
    for number, part in enumerate((list(weights)[:half], list(weights)[half:])):
        file = names.format(f"{number + 1:05}")
        save({name: weights[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def with_old_names(folder: Path) -> None:
    """Norms as TensorFlow names them, and buffers that were stored once."""
    old = {}
    for name, tensor in take_weights(folder).items():
        is_norm = "LayerNorm" in name or "layer_norm" in name
        for now, then in ((".weight", ".gamma"), (".bias", ".beta")) if is_norm else ():
            name = name.removesuffix(now) + (then if name.endswith(now) else "")
        old[name] = tensor
    old["albert.embeddings.position_ids"] = torch.arange(16)[None]
    old["albert.embeddings.token_type_ids"] = torch.zeros(1, 16, dtype=torch.int64)
    save_file(old, folder / "model.safetensors", {"format": "pt"})


def without_prefix(folder: Path) -> None:
    """As a bare `AlbertModel` is saved."""
    bare = {name.removeprefix("albert."): tensor for name, tensor in take_weights(folder).items()}
    torch.save(bare, folder / "pytorch_model.bin")


def wrapped(prefix: str) -> Damage:
    """As the model is saved inside of a module that holds it."""

    def wrap(folder: Path) -> None:
        weights = take_weights(folder)
        save_file({prefix + name: weights[name] for name in weights}, folder / "model.safetensors")

    return wrap


def assert_refused(folder: Path, message: str) -> None:
    """The checkpoint cannot be opened and loaded, for the reason in the message, which names it."""
    refused = pytest.raises((CheckpointError, BundleCorruptError), match=message)
    with refused as caught, open_checkpoint(folder) as checkpoint:
        load_checkpoint(checkpoint.folder)
    assert str(folder) in str(caught.value)


FORMS: Final = {
    "pickle": as_pickle,
    "pickle before torch 1.6": as_old_pickle,
    "pickles": as_pickles,
    "safetensors shards": as_safetensors_shards,
    "old names": with_old_names,
    "no prefix": without_prefix,
    "DataParallel": wrapped("module."),
    "Lightning, compiled": wrapped("model._orig_mod."),
}
