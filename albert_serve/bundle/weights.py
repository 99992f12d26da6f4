"""The header of `model.safetensors`, and the shapes that a configuration requires.

The file is 8 bytes of header length (little endian), a JSON header and the tensors' bytes
(https://github.com/huggingface/safetensors#format). The tensors have Hugging Face's names.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard, get_args

from albert_serve.config import AlbertConfig
from albert_serve.errors import BundleCorruptError

TaskName = Literal[
    "fill-mask",
    "text-classification",
    "question-answering",
    "sentence-order",
    "token-classification",
]
Shape = tuple[int, ...]
CLASSIFICATION: Final[TaskName] = "text-classification"
TOKENS: Final[TaskName] = "token-classification"
# Pattern of a classifier's NAME in its head, `text-classification/NAME`, and in file names.
HEAD_NAME: Final = "[a-z0-9][a-z0-9_-]{0,63}"
WORDS: Final = "albert.embeddings.word_embeddings.weight"
# An int8 matrix has one scale per output, in a tensor with its name and this suffix.
SCALE_SUFFIX: Final = "_scale"
# If an int8 matrix's inputs are smoothed before quantisation, their factors have this suffix.
SMOOTHING_SUFFIX: Final = "_smoothing_scale"
# This is enough for 100,000 tensors. The safetensors library reads six times as much.
_MAX_HEADER_BYTES: Final = 16 << 20
_MAX_DIMENSIONS: Final = 8
_MAX_SIZE: Final = 1 << 48

_DTYPE_BYTES: Final[dict[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
# `transformers` gives the sentence-order head as many outputs as the classifier has labels. Only
# the first two are used.
_ORDER_HEAD: Final = "sop_classifier.classifier."
NUM_ORDERS: Final = 2
# A task's head ends in this linear map. The output of fill-mask is tied to the embeddings.
OUTPUT_LAYERS: Final[dict[str, str]] = {
    "text-classification": "classifier",
    "question-answering": "qa_outputs",
    "sentence-order": "sop_classifier.classifier",
    "token-classification": "classifier",
}
# The heads of these tasks read rows without the pooler.
UNPOOLED_TASKS: Final[tuple[TaskName, ...]] = (
    "fill-mask",
    "question-answering",
    "token-classification",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """The location of a tensor in its file.

    Attributes:
        dtype: safetensors' name of the type, such as "F32".
        shape: sizes of the dimensions.
        offset: position of the first byte in the file.
        num_bytes: size in bytes.
    """

    dtype: str
    shape: Shape
    offset: int
    num_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, without the outputs that no head uses."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if header_size > _MAX_HEADER_BYTES:
            raise _damaged(file, f"its header has {header_size} bytes")
        if header_size > size - 8:
            raise _damaged(file, f"it has {size} bytes, fewer than its header needs")
        header = stream.read(header_size)
    try:
        entries = json.loads(header)
        tensors = {
            name: _stored_tensor(entry, 8 + header_size)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(file, f"its header cannot be read ({error!r})") from error
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=size)
    if end != size:
        raise _damaged(file, f"it has {size} bytes; its header describes {end}")
    return {name: _used_rows(name, tensor) for name, tensor in tensors.items()}


def used_shape(name: str, shape: Shape) -> Shape:
    """Return the shape of the used rows of a stored weight."""
    is_padded = name.startswith(_ORDER_HEAD) and shape[:1] > (NUM_ORDERS,)
    return (NUM_ORDERS, *shape[1:]) if is_padded else shape


def _used_rows(name: str, tensor: StoredTensor) -> StoredTensor:
    shape = used_shape(name, tensor.shape)
    if shape == tensor.shape:
        return tensor
    return replace(tensor, shape=shape, num_bytes=math.prod(shape) * _DTYPE_BYTES[tensor.dtype])


def is_task(head: str) -> TypeGuard[TaskName]:
    """Return whether a head has its task's name, like a task's only head or default head."""
    return head in get_args(TaskName)


def named_head(name: str) -> str:
    """Return the head of the additional text classifier with this name."""
    return f"{CLASSIFICATION}/{name}"


def task_of(head: str) -> str:
    """Return the task of a head."""
    return head.partition("/")[0]


def name_of(head: str) -> str:
    """Return the name of an additional text classifier, or an empty text for other heads."""
    return head.partition("/")[2]


def output_layer(head: str) -> str:
    """Return the prefix of the weights of a head's last linear map. Fill-mask has no such map."""
    name = name_of(head)
    return f"heads.{name}.classifier" if name else OUTPUT_LAYERS[head]


def expected_shapes(config: AlbertConfig, heads: Mapping[str, int]) -> dict[str, Shape]:
    """Return the shape of every weight that the backbone and the heads need, by name.

    Args:
        heads: number of outputs of each head, which is a task's name or `named_head`.
    """
    shapes = _embedding_shapes(config)
    attentions, ffns = zip(*config.layer_plan, strict=True)
    for block in sorted(set(attentions)):
        shapes |= _attention_shapes(config, layer_name(block, config))
    for block in sorted(set(ffns)):
        shapes |= _ffn_shapes(config, layer_name(block, config))
    for head, num_outputs in heads.items():
        shapes |= _head_shapes(config, head, num_outputs)
    return shapes


def _head_shapes(config: AlbertConfig, head: str, num_outputs: int) -> dict[str, Shape]:
    """Return the shapes of the weights of one head, including its pooler if it has one."""
    h, e = config.hidden_size, config.embedding_size
    if head == "fill-mask":
        return (
            _linear("predictions.dense", e, h)
            | _norm("predictions.LayerNorm", e)
            | {"predictions.bias": (config.vocab_size,)}
        )
    output = _linear(output_layer(head), num_outputs, h)
    return output if head in UNPOOLED_TASKS else _linear("albert.pooler", h, h) | output


def layer_name(block: int, config: AlbertConfig) -> str:
    """Return the prefix of the weights of a block of `AlbertConfig.layer_plan`."""
    group, inner = divmod(block, config.num_inner_layers)
    return f"albert.encoder.albert_layer_groups.{group}.albert_layers.{inner}"


def stored_name(name: str, stored: Mapping[str, object]) -> str:
    """Return a weight's name in the file, which lacks `albert.` if it has a bare `AlbertModel`."""
    bare_name = name.removeprefix("albert.")
    return bare_name if bare_name in stored and name not in stored else name


def check_shapes(stored: Mapping[str, StoredTensor], expected: Mapping[str, Shape]) -> None:
    """Check that each expected weight is stored, with the expected shape and a supported type.

    Vectors are fp32. Matrices are fp32 or fp16 of shape [out, in], as in torch, or int8 of shape
    [in, out]. An int8 matrix has one fp32 scale per output, and may have one factor per input.
    """
    for name, shape in expected.items():
        tensor = stored.get(stored_name(name, stored))
        if tensor is None:
            raise BundleCorruptError(f"The weights have no {name}, which the config requires.")
        _check_type(name, tensor, shape)
        _check_shape(name, tensor.shape, shape[::-1] if tensor.dtype == "I8" else shape)
        if tensor.dtype == "I8":
            scale = stored.get(stored_name(name, stored) + SCALE_SUFFIX)
            if scale is None or scale.dtype != "F32":
                raise BundleCorruptError(
                    f"The int8 weight {name} has no F32 tensor {name}{SCALE_SUFFIX}."
                )
            _check_shape(name + SCALE_SUFFIX, scale.shape, shape[:1])


def _check_type(name: str, tensor: StoredTensor, shape: Shape) -> None:
    allowed = ("F32", "F16", "I8") if len(shape) == 2 else ("F32",)
    if tensor.dtype not in allowed:
        raise BundleCorruptError(
            f"The weight {name} is {tensor.dtype}; only {', '.join(allowed)} can be read."
        )


def _check_shape(name: str, shape: Shape, expected: Shape) -> None:
    if shape != expected:
        raise BundleCorruptError(
            f"The weight {name} has shape {shape}; the config requires {expected}."
        )


def _stored_tensor(entry: dict[str, Any], data_start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int:
        raise ValueError(f"data_offsets must be two integers; got {begin!r} and {end!r}")
    shape = tuple(entry["shape"])
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(
            f"a tensor has {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are supported"
        )
    if not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape):
        raise ValueError(f"a size in a shape is not a whole number up to {_MAX_SIZE}")
    if end - begin != math.prod(shape) * _DTYPE_BYTES[entry["dtype"]] or begin < 0:
        raise ValueError(f"bytes {begin} to {end} do not fit shape {shape} of {entry['dtype']}")
    return StoredTensor(
        dtype=entry["dtype"], shape=shape, offset=data_start + begin, num_bytes=end - begin
    )


def _damaged(file: Path, reason: str) -> BundleCorruptError:
    return BundleCorruptError(f"{file} is damaged: {reason}. Copy or download it again.")


def _linear(name: str, num_out: int, num_in: int) -> dict[str, Shape]:
    return {f"{name}.weight": (num_out, num_in), f"{name}.bias": (num_out,)}


def _norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _embedding_shapes(config: AlbertConfig) -> dict[str, Shape]:
    e, prefix = config.embedding_size, "albert.embeddings"
    return {
        f"{prefix}.word_embeddings.weight": (config.vocab_size, e),
        f"{prefix}.position_embeddings.weight": (config.max_positions, e),
        f"{prefix}.token_type_embeddings.weight": (config.num_token_types, e),
        **_norm(f"{prefix}.LayerNorm", e),
        **_linear("albert.encoder.embedding_hidden_mapping_in", config.hidden_size, e),
    }


def _attention_shapes(config: AlbertConfig, layer: str) -> dict[str, Shape]:
    h = config.hidden_size
    shapes = _norm(f"{layer}.attention.LayerNorm", h)
    for part in ("query", "key", "value", "dense"):
        shapes |= _linear(f"{layer}.attention.{part}", h, h)
    return shapes


def _ffn_shapes(config: AlbertConfig, layer: str) -> dict[str, Shape]:
    h, f = config.hidden_size, config.ffn_size
    return (
        _linear(f"{layer}.ffn", f, h)
        | _linear(f"{layer}.ffn_output", h, f)
        | _norm(f"{layer}.full_layer_layer_norm", h)
    )
