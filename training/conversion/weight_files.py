"""Reader of a Hugging Face directory's weights, in all formats that `transformers` has written.

The weights are safetensors or torch pickles, in one file or several, with any floating-point type
and the names of any version. A pickle is read as tensors only: no code in it is run.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from albert_serve.bundle.manifest import TOKENIZER_FILE, WEIGHTS_FILE, read_manifest
from albert_serve.bundle.weights import (
    CLASSIFICATION,
    SCALE_SUFFIX,
    SMOOTHING_SUFFIX,
    WORDS,
    read_header,
)
from albert_serve.files import read_small_file
from training.model.checkpoint import CheckpointError, label_keys, write_weights
from training.model.hf_names import with_backbone_prefix

_PICKLE_FILE: Final = "pytorch_model.bin"
# Files in the order in which `transformers` looks for them. `NAME.index.json` lists shards.
_FILES: Final = (WEIGHTS_FILE, _PICKLE_FILE)
_MAX_INDEX_BYTES: Final = 16 << 20
# Old versions stored these buffers, which are not weights.
_BUFFER: Final = re.compile(r"(^|\.)(position_ids|token_type_ids)$")
# Current suffixes of norms, by their suffixes in checkpoints converted from TensorFlow.
_NORM: Final = {".gamma": ".weight", ".beta": ".bias"}
_DECODER: Final = "predictions.decoder."
# DataParallel, torch.compile and wrapping modules, such as Lightning's, add these prefixes.
_WRAPPER: Final = re.compile(r"(?:(?:module|model|_orig_mod)\.)+")


def find_weights(folder: Path) -> Path | None:
    """Return the file of the weights or their index, or None without either."""
    for name in _FILES:
        for file in (folder / name, folder / f"{name}.index.json"):
            if file.is_file():
                return file
    return None


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read all weights as fp32, by their current names in `transformers`."""
    file = find_weights(folder)
    if file is None:
        raise CheckpointError(
            f"{folder} does not contain weights: no {' or '.join(_FILES)}, and no index of shards."
        )
    tensors = _read_indexed(file) if file.suffix == ".json" else _read_file(file)
    return _normalize(tensors, file)


def is_current(name: str) -> bool:
    """Return whether a weight's name is current, and not an old version's."""
    return not (
        _BUFFER.search(name)
        or name.endswith(tuple(_NORM))
        or name.startswith(_DECODER)
        or _WRAPPER.match(name)
    )


def _read_file(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        read_header(file)  # gives clearer errors, and limits the header's size
        try:
            return load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged: {error}. Download it again.") from error
    return _read_pickle(file)


def missing_files(weights: Path) -> list[str]:
    """Return the names in an index whose files are missing from its folder."""
    if weights.suffix != ".json":
        return []
    names = sorted(set(_read_index(weights).values()))
    return [name for name in names if not (weights.parent / name).is_file()]


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each weight that an index lists."""
    try:
        file_by_weight = json.loads(read_small_file(index, _MAX_INDEX_BYTES))["weight_map"]
        names = sorted(set(file_by_weight.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weights: {error!r}.") from error
    suffix = index.name.removesuffix(".index.json").rpartition(".")[2]
    for name in names:
        # A file outside the folder does not belong to the checkpoint, and may be a secret.
        if not isinstance(name, str) or not re.fullmatch(rf"[\w.-]+\.{suffix}", name):
            raise CheckpointError(
                f"{index} lists {name!r}, which is not the name of a .{suffix} file."
            )
    return dict(file_by_weight)


def _read_indexed(index: Path) -> dict[str, Tensor]:
    """Read the files that an index lists."""
    file_by_weight = _read_index(index)
    if missing := missing_files(index):
        raise CheckpointError(
            f"{index.parent / missing[0]} does not exist, but {index.name} lists it."
        )
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(file_by_weight.values())):
        tensors |= _read_file(index.parent / name)
    missing = sorted(file_by_weight.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{index} lists {missing[0]}, but none of its files contains it.")
    return tensors


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """Read a pickle of tensors, from a zip archive or in the format before torch 1.6."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about other programs' pickles
            content = torch.load(
                file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
            )
    except Exception as error:  # a damaged file raises almost anything
        # Only torch's first sentence is kept: the rest advises to load without this safeguard.
        reason = re.split(r"\.\s|\n", str(error).strip() or type(error).__name__)[0]
        rejected_code = re.search(r"GLOBAL [\w.]+", str(error))
        raise CheckpointError(
            f"{file} cannot be read without running code: "
            f"{rejected_code[0] if rejected_code else reason}. Check that it is complete."
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise CheckpointError(
            f"{file} does not contain only weights by name. Save only the state_dict."
        )
    return dict(content)


def _normalize(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return fp32 weights by their current names, without buffers and copies of tied weights."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        current = _current_name(name)
        if _BUFFER.search(name):
            continue
        if not tensor.is_floating_point():
            raise CheckpointError(f"{file}: {name} is {tensor.dtype}, not floating point.")
        if current in renamed:
            raise CheckpointError(f"{file} has two weights for {current}.")
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{file}: {name} contains NaN or infinite numbers. Save the checkpoint again."
            )
        renamed[current] = tensor.to(torch.float32)
    return _without_decoder(with_backbone_prefix(renamed), file)


def _current_name(name: str) -> str:
    stem, dot, kind = _WRAPPER.sub("", name, count=1).rpartition(".")
    return stem + _NORM.get(dot + kind, dot + kind)


def _without_decoder(weights: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Drop the decoder's copy of the word embeddings, but keep its bias."""
    bias = weights.pop(f"{_DECODER}bias", None)
    if bias is not None and "predictions.dense.weight" in weights:
        weights["predictions.bias"] = bias
    weight = weights.pop(f"{_DECODER}weight", None)
    if weight is not None and WORDS in weights and not torch.equal(weight, weights[WORDS]):
        raise CheckpointError(
            f"{file}: {_DECODER}weight differs from the word embeddings. ALBERT ties the two."
        )
    return weights


def write_from_int8(bundle: Path, folder: Path) -> None:
    """Write the rounded weights of an int8 bundle as a checkpoint into a new folder."""
    folder.mkdir()
    manifest = read_manifest(bundle)
    classifier = manifest.heads.get(CLASSIFICATION)
    labels = label_keys(classifier.labels or ()) if classifier is not None else {}
    config = json.dumps({**manifest.config, **labels})
    (folder / "config.json").write_text(config, encoding="utf-8")
    restore_weights(bundle / WEIGHTS_FILE, folder / WEIGHTS_FILE)
    shutil.copyfile(bundle / TOKENIZER_FILE, folder / TOKENIZER_FILE)


def restore_weights(file: Path, target: Path) -> None:
    """Write a bundle's weights of any precision as fp32."""
    stored = load_file(file)
    names = (name for name in stored if not name.endswith(SCALE_SUFFIX))
    write_weights({name: _restore(name, stored) for name in names}, target)


def _restore(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    """Return a weight as fp32, [out, in]. int8 matrices are stored transposed, [in, out]."""
    scale_O, factors_I = stored.get(name + SCALE_SUFFIX), stored.get(name + SMOOTHING_SUFFIX)
    weight = stored[name].float()
    if scale_O is not None:
        weight = (weight * scale_O).T
    if factors_I is not None:
        weight = weight * factors_I
    return weight.contiguous()
