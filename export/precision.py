"""Conversion of a checkpoint's weights to the precision of a bundle.

Vectors stay in fp32, and so do small matrices: positions, token types and output layers.

fp16 saves disk space only: a CPU computes in fp32. int8 is symmetric with a scale for each output.
Its matrices have the layout [in, out] of the runtime's product, so one stored copy of the word
embeddings serves both ends of the model. The weights of two adjacent inputs sum to at most 128
steps, so the product is exact on every CPU (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from torch import Tensor, nn

from albert_serve.bundle.manifest import Part, Precision
from albert_serve.bundle.weights import SCALE_SUFFIX, SMOOTHING_SUFFIX, layer_name, stored_name
from albert_serve.progress import progress
from albert_serve.tokenizer import SpecialIds
from export.config import ExportError
from export.source import Source, read_weight
from export.verify import random_batches, torch_batch
from training.model.heads import AlbertForTasks

# Suffixes of the matrix names in each part.
PARTS: Final[dict[Part, tuple[str, ...]]] = {
    "embeddings": ("word_embeddings", "embedding_hidden_mapping_in"),
    "attention": ("query", "key", "value", "attention.dense"),
    "ffn": ("ffn", "ffn_output"),
    "heads": ("pooler", "predictions.dense", "dense_0"),
}
_STEPS: Final = 127
_MAX_FP16: Final = float(np.finfo(np.float16).max)

_Array = NDArray[Any]


def write_weights(
    source: Source,
    file: Path,
    precision: Precision,
    fp32_parts: Collection[Part],
    largest_inputs: Mapping[str, _Array],
) -> None:
    """Write the weights that the tasks need.

    Args:
        source: checkpoint with the weights.
        file: file to write.
        precision: precision of the matrices.
        fp32_parts: parts that stay in fp32.
        largest_inputs: largest absolute inputs (I) of each matrix whose inputs are smoothed in
            int8, by its stored name.
    """
    names = progress(source.names, title=f"to {precision}", unit="weights")
    tensors = {
        key: array
        for name in names
        for key, array in _convert(source, name, precision, fp32_parts, largest_inputs)
    }
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    file.chmod(0o644)  # safetensors writes a file that only its owner can read


def part_of(name: str) -> Part | None:
    """Return the part that a matrix belongs to, or None for a weight that is always fp32."""
    stem = name.removesuffix(".weight")
    for part, suffixes in PARTS.items():
        if stem != name and any(f".{stem}".endswith(f".{suffix}") for suffix in suffixes):
            return part
    return None


def quantize(weight_OI: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise a matrix [O, I] to int8 [I, O] and a scale (O) per output: weight = int8 * scale."""
    # x86 CPUs without VNNI add the products of two adjacent inputs in signed 16 bits: 255 * 128
    # fits, and 255 * 129 saturates.
    pairs_OI = weight_OI[:, :-1:2] + weight_OI[:, 1::2]
    largest_O = np.maximum(np.abs(weight_OI).max(axis=1), np.abs(pairs_OI).max(axis=1, initial=0))
    scale_O = largest_O / _STEPS
    safe_O1 = np.where(scale_O > 0, scale_O, 1.0)[:, None]
    steps_OI = np.clip(np.rint(weight_OI / safe_O1), -_STEPS, _STEPS)
    return np.ascontiguousarray(steps_OI.T.astype(np.int8)), scale_O.astype(np.float32)


def smoothing(largest_I: _Array) -> _Array:
    """Return the smoothing factors (I) of inputs with these largest absolute values (I).

    A row has one scale, so an outlier channel leaves few steps to the other channels. A channel
    whose largest value exceeds the median is multiplied by sqrt(median / largest). Its weights are
    divided by the same factor (SmoothQuant with alpha 0.5, Xiao et al. 2023).
    """
    median = np.median(largest_I)
    return np.sqrt(median / np.maximum(largest_I, median)) if median > 0 else 0 * largest_I + 1


def _convert(
    source: Source,
    name: str,
    precision: Precision,
    fp32_parts: Collection[Part],
    largest_inputs: Mapping[str, _Array],
) -> Iterator[tuple[str, _Array]]:
    weight: _Array = read_weight(source.weights_file, source.tensors[name])
    part = part_of(name)
    if part is None or part in fp32_parts or precision == "fp32":
        yield name, np.array(weight)
    elif precision == "int8":
        if name in largest_inputs:
            factors_I = smoothing(largest_inputs[name])
            weight = weight / factors_I
            yield name + SMOOTHING_SUFFIX, factors_I
        int8_IO, scale_O = quantize(weight)
        yield name, int8_IO
        yield name + SCALE_SUFFIX, scale_O
    else:
        if np.abs(weight).max() > _MAX_FP16:
            raise ExportError(
                f"{name} has values of more than {_MAX_FP16:.0f}, the largest of fp16. Export "
                f"the model in fp32, or only this part with --keep-fp32 {part}."
            )
        yield name, weight.astype(np.float16)


@torch.inference_mode()
def largest_inputs(
    model: AlbertForTasks, special: SpecialIds, tensors: Mapping[str, object]
) -> dict[str, NDArray[Any]]:
    """Return the largest absolute inputs (I) of each smoothed matrix, by its stored name.

    [CLS] states have some channels that are 10 to 50 times as large as the others: before the
    feed-forward part, between its matrices, and before the pooler. This is also true in sequences
    of random ids, so no texts are needed.
    """
    largest: dict[str, NDArray[Any]] = {}

    def update_largest(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        batch_I = inputs[0].abs().flatten(0, -2).amax(0).numpy()
        largest[name] = np.maximum(largest.get(name, batch_I), batch_I)

    hooks = [
        linear.register_forward_pre_hook(partial(update_largest, stored_name(name, tensors)))
        for name, linear in _smoothed(model)
    ]
    for batch in random_batches(model.config, special):
        hidden_BSH = model.eval()(torch_batch(batch))
        if model.pooler is not None:
            model.pooler(hidden_BSH[:, 0])
    for hook in hooks:
        hook.remove()
    return largest


def _smoothed(model: AlbertForTasks) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear maps whose inputs are smoothed, with the names of their matrices.

    The inputs of attention have no outlier channels, and its maps share one quantised input.
    """
    for number, ffn in enumerate(model.albert.encoder.ffns):
        prefix = layer_name(number, model.config)
        yield f"{prefix}.ffn.weight", ffn.get_submodule("up")
        yield f"{prefix}.ffn_output.weight", ffn.get_submodule("down")
    if model.pooler is not None:
        yield "albert.pooler.weight", model.pooler.get_submodule("dense")
