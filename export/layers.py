"""The blocks of an ALBERT as ONNX nodes, for every device and precision.

Matrices in fp32 and fp16 have torch's layout, [out, in]; FusedMatMul reads them transposed in
place. Matrices in int8 have the layout [in, out] of the runtime's product.

An int8 product multiplies activations in U8 by weights in S8. Each row of activations has its own
scale, so the answer to a text does not depend on the other texts of its batch. Each output of the
weights has its own scale, too.

Shape legend: B sequences, S positions, R rows (B * S, or the requested rows), E embedding size,
H hidden size, F feed-forward size, I inputs and O outputs of a linear map.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import TensorProto

from albert_serve.bundle.weights import SCALE_SUFFIX, WORDS
from albert_serve.config import AlbertConfig
from export.graph import CONTRIB, Nodes

_EMBEDDINGS: Final = "albert.embeddings"
_PROJECTION: Final = "albert.encoder.embedding_hidden_mapping_in"
_QKV: Final = ("query", "key", "value")
# The zero point of U8 is in the middle, with 127 steps on either side.
_ZERO: Final = 128
_STEPS: Final = 127
# Minimum scale, which avoids a division by zero in rows of zeros.
_MIN_SCALE: Final = 1e-30


def embed(nodes: Nodes, config: AlbertConfig, ids: str, types: str) -> str:
    """Return the normalised and projected embeddings (R, H) of ids (B, S) and types (B, S)."""
    zero = nodes.constant("position_axis", np.array([0], np.int64))
    length = nodes.add("Shape", [ids], attributes={"start": 1, "end": 2})
    table = nodes.weight(f"{_EMBEDDINGS}.position_embeddings.weight")
    position_SE = nodes.add("Slice", [table, zero, length, zero])
    type_BSE = nodes.add(
        "Gather", [nodes.weight(f"{_EMBEDDINGS}.token_type_embeddings.weight"), types]
    )
    sum_BSE = nodes.add("Add", [nodes.add("Add", [_words(nodes, ids), type_BSE]), position_SE])
    normed_BSE = norm(nodes, config, sum_BSE, f"{_EMBEDDINGS}.LayerNorm")
    return linear(nodes, as_rows(nodes, normed_BSE, config.embedding_size), _PROJECTION)


def flatten(nodes: Nodes, ids_BS: str) -> str:
    """Reshape ids (B, S) to (R)."""
    return nodes.add("Reshape", [ids_BS, nodes.constant("last_axis", np.array([-1], np.int64))])


def as_rows(nodes: Nodes, x: str, size: int) -> str:
    """Reshape (B, S, size) to (R, size)."""
    shape = nodes.constant(f"rows_of_{size}", np.array([-1, size], np.int64))
    return nodes.add("Reshape", [x, shape])


def cast(nodes: Nodes, x: str, dtype: str) -> str:
    """Convert values from a type, given by its safetensors name, to the graph's compute type."""
    if dtype == nodes.version.dtype:
        return x
    return nodes.add("Cast", [x], attributes={"to": nodes.version.data_type})


def apply_layer(
    nodes: Nodes,
    config: AlbertConfig,
    x_RH: str,
    shape: str,
    lengths_B: str,
    *,
    attention: str,
    ffn: str,
) -> str:
    """Append one layer, (R, H) to (R, H): LN(x + attend(x)), then LN(x + down(act(up(x)))).

    Args:
        nodes: nodes of the graph or Loop body that the layer is appended to.
        config: sizes of the model.
        x_RH: name of the value with the hidden states.
        shape: name of the value with the shape (B, S, H), int64.
        lengths_B: name of the value with the number of tokens in each sequence, int64.
        attention: prefix of the attention's weights.
        ffn: prefix of the feed-forward part's weights.
    """
    qkv = [
        nodes.add("Reshape", [linear(nodes, x_RH, f"{attention}.attention.{part}"), shape])
        for part in _QKV
    ]
    context_RH = as_rows(nodes, _attend(nodes, config, qkv, lengths_B), config.hidden_size)
    dense = f"{attention}.attention.dense"
    out_RH = matmul(nodes, context_RH, dense)
    x_RH = _add_norm(nodes, config, out_RH, x_RH, f"{attention}.attention.LayerNorm", dense)
    up_RF = activate(nodes, config, matmul(nodes, x_RH, f"{ffn}.ffn"), f"{ffn}.ffn")
    down = f"{ffn}.ffn_output"
    out_RH = matmul(nodes, up_RF, down)
    return _add_norm(nodes, config, out_RH, x_RH, f"{ffn}.full_layer_layer_norm", down)


def linear(nodes: Nodes, x_RI: str, name: str) -> str:
    """Apply the linear map `name` with its bias to rows: (R, O)."""
    return nodes.add("Add", [matmul(nodes, x_RI, name), nodes.weight(f"{name}.bias")])


def matmul(nodes: Nodes, x_RI: str, name: str) -> str:
    """Apply the linear map `name` without its bias to rows: (R, O)."""
    return multiply(nodes, x_RI, f"{name}.weight")


def multiply(nodes: Nodes, x_RI: str, weight: str) -> str:
    """Multiply rows by a transposed weight [O, I] of any stored type: (R, O)."""
    if nodes.initializers.dtype(weight) == "I8" and nodes.version.kernels == "cpu":
        return _multiply_int8(nodes, x_RI, weight)
    return nodes.add(
        "FusedMatMul", [x_RI, nodes.weight(weight)], domain=CONTRIB, attributes={"transB": 1}
    )


def activate(nodes: Nodes, config: AlbertConfig, x: str, biased_as: str) -> str:
    """Apply the activation to x plus the bias of the linear map `biased_as`."""
    op = "FastGelu" if config.activation == "gelu_tanh" else "BiasGelu"
    return nodes.add(op, [x, nodes.weight(f"{biased_as}.bias")], domain=CONTRIB)


def norm(nodes: Nodes, config: AlbertConfig, x: str, name: str) -> str:
    """Apply the layer norm `name` to x."""
    return nodes.add(
        "LayerNormalization",
        [x, nodes.weight(f"{name}.weight"), nodes.weight(f"{name}.bias")],
        attributes={"axis": -1, "epsilon": config.layer_norm_eps},
    )


def _words(nodes: Nodes, ids_BS: str) -> str:
    """Return rows (B, S, E) of the word embeddings. Only these rows are converted."""
    table = nodes.initializers.add_stored(WORDS)
    dtype = nodes.initializers.dtype(WORDS)
    if dtype != "I8":
        return cast(nodes, nodes.add("Gather", [table, ids_BS]), dtype)
    columns_EBS = nodes.add("Gather", [table, ids_BS], attributes={"axis": 1})
    row_BSE = nodes.add("Transpose", [columns_EBS], attributes={"perm": [1, 2, 0]})
    scale_BS = nodes.add("Gather", [nodes.initializers.add_stored(WORDS + SCALE_SUFFIX), ids_BS])
    last = nodes.constant("last_axis", np.array([-1], np.int64))
    scale_BS1 = nodes.add("Unsqueeze", [scale_BS, last])
    full_BSE = nodes.add("Cast", [row_BSE], attributes={"to": TensorProto.FLOAT})
    return cast(nodes, nodes.add("Mul", [full_BSE, scale_BS1]), "F32")


def _multiply_int8(nodes: Nodes, x_RI: str, weight: str) -> str:
    """Multiply in int8, then scale the rows, because the kernel takes one scale for all rows."""
    factors_I = nodes.initializers.smoothing(weight)
    if factors_I is not None:
        x_RI = nodes.add("Mul", [x_RI, factors_I])
    quantized_RI, scale_R1 = _quantize_rows(nodes, x_RI)
    one = nodes.constant("one", np.array(1, np.float32))
    zero = nodes.constant("zero", np.array(_ZERO, np.uint8))
    scale_O = nodes.weight(weight + SCALE_SUFFIX)
    product_RO = nodes.add(
        "MatMulIntegerToFloat",
        [quantized_RI, nodes.initializers.add_stored(weight), one, scale_O, zero],
        domain=CONTRIB,
    )
    return nodes.add("Mul", [product_RO, scale_R1])


def _quantize_rows(nodes: Nodes, x_RI: str) -> tuple[str, str]:
    """Return the rows as uint8 (R, I) and their scales (R, 1)."""
    last = nodes.constant("last_axis", np.array([-1], np.int64))
    step = nodes.constant("step", np.array(1 / _STEPS, np.float32))
    min_scale = nodes.constant("min_scale", np.array(_MIN_SCALE, np.float32))
    zero = nodes.constant("zero", np.array(_ZERO, np.uint8))
    largest_R1 = nodes.add(
        "ReduceMax", [nodes.add("Abs", [x_RI]), last], attributes={"keepdims": 1}
    )
    scale_R1 = nodes.add("Max", [nodes.add("Mul", [largest_R1, step]), min_scale])
    scale_R = nodes.add("Squeeze", [scale_R1, last])
    # The zero points are computed once, because these nodes are outside the Loop.
    zero_R = nodes.outer.add("Expand", [zero, nodes.outer.add("Shape", [nodes.rows or scale_R])])
    quantized_RI = nodes.add("QuantizeLinear", [x_RI, scale_R, zero_R], attributes={"axis": 0})
    return quantized_RI, scale_R1


def _attend(nodes: Nodes, config: AlbertConfig, qkv_BSH: list[str], lengths_B: str) -> str:
    """Return the attention (B, S, H) over the tokens of each sequence, without padding."""
    heads = config.num_heads
    # With lengths, Attention has flash kernels on CUDA, unlike MultiHeadAttention. On a CPU, it is
    # 1.2 to 2.4 times as fast.
    return nodes.add(
        "Attention",
        [*qkv_BSH, "", "", "", lengths_B],
        attributes={"q_num_heads": heads, "kv_num_heads": heads},
    )


def _add_norm(
    nodes: Nodes, config: AlbertConfig, x: str, residual: str, name: str, biased_as: str
) -> str:
    """Apply the layer norm `name` to x + residual + the bias of the linear map `biased_as`."""
    bias = nodes.weight(f"{biased_as}.bias")
    if nodes.version.kernels == "cuda":
        scale, shift = nodes.weight(f"{name}.weight"), nodes.weight(f"{name}.bias")
        return nodes.add(
            "SkipLayerNormalization",
            [x, residual, scale, shift, bias],
            domain=CONTRIB,
            attributes={"epsilon": config.layer_norm_eps},
        )
    # On a CPU, the fused operator takes 6 times as long as these three.
    return norm(nodes, config, nodes.add("Add", [nodes.add("Add", [x, bias]), residual]), name)
