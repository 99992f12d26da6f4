"""The parts of an ALBERT as ONNX nodes, each described once.

Weights stay as torch lays them out, [out, in]; FusedMatMul reads them transposed in place.

Shape legend: B sequences, S positions, E embedding size, H hidden size, F feed-forward size.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from albert_serve.config import AlbertConfig
from export.graph import CONTRIB, Nodes

_EMBEDDINGS: Final = "albert.embeddings"
_PROJECTION: Final = "albert.encoder.embedding_hidden_mapping_in"
_QKV: Final = ("query", "key", "value")


def embed(nodes: Nodes, config: AlbertConfig, ids: str, types: str) -> str:
    """Embeddings of ids (B, S) and types (B, S), normed and projected: (B, S, H)."""
    constant = nodes.initializers.constant
    zero = constant("position_axis", np.array([0], np.int64))
    length = nodes.add("Shape", [ids], attributes={"start": 1, "end": 2})
    table = nodes.weight(f"{_EMBEDDINGS}.position_embeddings.weight")
    position_SE = nodes.add("Slice", [table, zero, length, zero])
    word_BSE = nodes.add("Gather", [nodes.weight(f"{_EMBEDDINGS}.word_embeddings.weight"), ids])
    type_BSE = nodes.add(
        "Gather", [nodes.weight(f"{_EMBEDDINGS}.token_type_embeddings.weight"), types]
    )
    sum_BSE = nodes.add("Add", [nodes.add("Add", [word_BSE, type_BSE]), position_SE])
    normed_BSE = norm(nodes, config, sum_BSE, f"{_EMBEDDINGS}.LayerNorm")
    return linear(nodes, normed_BSE, _PROJECTION)


def join_biases(nodes: Nodes, attention: str) -> str:
    """The biases of query, key and value as the one vector (3H) that MultiHeadAttention takes.

    The runtime folds this when it loads the graph, so it costs a few kB of memory and no time.
    It must stand in the outermost graph: in a Loop body it may be done again at every turn.
    """
    biases = [nodes.weight(f"{attention}.attention.{part}.bias") for part in _QKV]
    return nodes.add("Concat", biases, attributes={"axis": 0})


def apply_layer(
    nodes: Nodes,
    config: AlbertConfig,
    x_BSH: str,
    lengths_B: str,
    *,
    attention: str,
    ffn: str,
    qkv_bias: str,
) -> str:
    """One layer: LN(x + attend(x)), then LN(x + down(act(up(x)))); (B, S, H) to (B, S, H).

    Args:
        nodes: where the layer is appended: a graph's, or a Loop body's.
        config: the sizes of the model.
        x_BSH: hidden states.
        lengths_B: real tokens of each sequence, int32.
        attention: the prefix of the attention's weights.
        ffn: the prefix of the feed-forward part's weights.
        qkv_bias: what `join_biases` gave for this attention.
    """
    qkv = [matmul(nodes, x_BSH, f"{attention}.attention.{part}") for part in _QKV]
    seen_BSH = nodes.add(
        "MultiHeadAttention",
        [*qkv, qkv_bias, lengths_B],
        domain=CONTRIB,
        attributes={"num_heads": config.num_heads},
    )
    dense = f"{attention}.attention.dense"
    out_BSH = matmul(nodes, seen_BSH, dense)
    x_BSH = add_norm(nodes, config, out_BSH, x_BSH, f"{attention}.attention.LayerNorm", dense)
    up_BSF = activate(nodes, config, matmul(nodes, x_BSH, f"{ffn}.ffn"), f"{ffn}.ffn")
    down = f"{ffn}.ffn_output"
    out_BSH = matmul(nodes, up_BSF, down)
    return add_norm(nodes, config, out_BSH, x_BSH, f"{ffn}.full_layer_layer_norm", down)


def matmul(nodes: Nodes, x: str, name: str) -> str:
    """Multiply x by the transposed weight of the linear map `name`, without its bias."""
    weight = nodes.weight(f"{name}.weight")
    return nodes.add("FusedMatMul", [x, weight], domain=CONTRIB, attributes={"transB": 1})


def linear(nodes: Nodes, x: str, name: str) -> str:
    """The linear map `name` of x, bias included."""
    return nodes.add("Add", [matmul(nodes, x, name), nodes.weight(f"{name}.bias")])


def activate(nodes: Nodes, config: AlbertConfig, x: str, biased_as: str) -> str:
    """The activation of x plus the bias of the linear map `biased_as`."""
    op = "FastGelu" if config.activation == "gelu_tanh" else "BiasGelu"
    return nodes.add(op, [x, nodes.weight(f"{biased_as}.bias")], domain=CONTRIB)


def norm(nodes: Nodes, config: AlbertConfig, x: str, name: str) -> str:
    """The layer norm `name` of x."""
    return nodes.add(
        "LayerNormalization",
        [x, nodes.weight(f"{name}.weight"), nodes.weight(f"{name}.bias")],
        attributes={"axis": -1, "epsilon": config.layer_norm_eps},
    )


def add_norm(
    nodes: Nodes, config: AlbertConfig, x: str, residual: str, name: str, biased_as: str
) -> str:
    """The layer norm `name` of x + residual + the bias of the linear map `biased_as`."""
    scale, shift = nodes.weight(f"{name}.weight"), nodes.weight(f"{name}.bias")
    return nodes.add(
        "SkipLayerNormalization",
        [x, residual, scale, shift, nodes.weight(f"{biased_as}.bias")],
        domain=CONTRIB,
        attributes={"epsilon": config.layer_norm_eps},
    )
