"""Graphs of the heads: gathered rows of hidden states to rows of logits.

Shape legend: B sequences, S positions, R rows asked for, H hidden size, E embedding size,
V vocabulary, K outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnx import ModelProto, TensorProto, helper

from albert_serve.bundle.weights import (
    UNPOOLED_TASKS,
    WORDS,
    StoredTensor,
    output_layer,
)
from albert_serve.config import AlbertConfig
from export.encoder import HIDDEN
from export.graph import CPU_FORM, Form, Initializers, Nodes, make_model
from export.layers import activate, as_rows, linear, matmul, multiply, norm


def build_head(
    config: AlbertConfig,
    head: str,
    num_outputs: int,
    stored: Mapping[str, StoredTensor],
    form: Form = CPU_FORM,
) -> ModelProto:
    """Build (hidden_states (B, S, H), rows (R)) -> logits (R, num_outputs), with the pooler.

    `rows` are int64: row b * S + s is position s of sequence b. A head computes in fp32 in every
    form, since its rows are few.
    """
    initializers = Initializers(stored, replace(form, compute="fp32"))
    nodes = Nodes(initializers, rows="rows")
    rows_RH = nodes.add("Gather", [as_rows(nodes, HIDDEN, config.hidden_size), "rows"])
    if head == "fill-mask":
        logits_RK = _fill_mask(nodes, config, rows_RH)
    else:
        pooled_RH = rows_RH if head in UNPOOLED_TASKS else _pool(nodes, rows_RH)
        logits_RK = linear(nodes, pooled_RH, output_layer(head))
    nodes.return_as(logits_RK, "logits")
    hidden_shape: list[str | int | None] = ["batch", "sequence", config.hidden_size]
    hidden = helper.make_tensor_value_info(HIDDEN, TensorProto.FLOAT, hidden_shape)
    rows = helper.make_tensor_value_info("rows", TensorProto.INT64, ["rows"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", num_outputs])
    return make_model(head.replace("-", "_"), nodes, [hidden, rows], [logits])


def _pool(nodes: Nodes, rows_RH: str) -> str:
    return nodes.add("Tanh", [linear(nodes, rows_RH, "albert.pooler")])


def _fill_mask(nodes: Nodes, config: AlbertConfig, rows_RH: str) -> str:
    """Map H to E, then to V through the encoder's word embeddings."""
    dense = "predictions.dense"
    dense_RE = activate(nodes, config, matmul(nodes, rows_RH, dense), dense)
    normed_RE = norm(nodes, config, dense_RE, "predictions.LayerNorm")
    logits_RV = multiply(nodes, normed_RE, WORDS)
    return nodes.add("Add", [logits_RV, nodes.weight("predictions.bias")])
