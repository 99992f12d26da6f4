"""Graphs of the encoder (ids to hidden states) and of the heads (hidden states to logits).

A Loop over one group's layers loads 12 to 20 times as fast as the unrolled layers, and runs equally
fast. On CUDA, the layers are unrolled, because the host would have to read a Loop's condition at
each iteration.

Shape legend: B sequences, S positions, R rows, H hidden size, E embedding size, V vocabulary,
K outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from albert_serve.bundle.weights import (
    UNPOOLED_TASKS,
    WORDS,
    StoredTensor,
    layer_name,
    output_layer,
)
from albert_serve.config import AlbertConfig
from export.graph import CPU_VERSION, GraphVersion, Initializers, Nodes, make_model
from export.layers import (
    activate,
    apply_layer,
    as_rows,
    embed,
    flatten,
    linear,
    matmul,
    multiply,
    norm,
)

# For each layer of one iteration: the index of its attention and of its feed-forward part.
_Iteration = tuple[tuple[int, int], ...]

_LENGTHS: Final = "lengths"
HIDDEN: Final = "hidden_states"


def build_encoder(
    config: AlbertConfig,
    tensors: Mapping[str, StoredTensor],
    version: GraphVersion = CPU_VERSION,
) -> ModelProto:
    """Build the graph (input_ids, token_type_ids (B, S), lengths (B)) -> hidden_states (B, S, H).

    Inputs are int64. Hidden states are fp32 in every version, because the heads read fp32.

    Args:
        config: sizes of the model.
        tensors: locations of the weights in `model.safetensors`, and their types.
        version: version of the graph. Only layers that are applied repeatedly form a Loop.
    """
    nodes = Nodes(Initializers(tensors, version), rows="input_ids")
    nodes.rows = flatten(nodes, "input_ids")
    x_RH = embed(nodes, config, "input_ids", "token_type_ids")
    size = nodes.constant("hidden_size", np.array([config.hidden_size], np.int64))
    batch = nodes.add("Shape", ["input_ids"])
    stack = _Stack(
        config=config,
        nodes=nodes,
        shape=nodes.add("Concat", [batch, size], attributes={"axis": 0}),
    )
    for iteration, num_iterations in _repetitions(config):
        if version.kernels == "cpu" and num_iterations > 1:
            x_RH = stack.loop(iteration, num_iterations, x_RH)
        else:
            for _ in range(num_iterations):
                x_RH = stack.apply(nodes, iteration, x_RH)
    x_BSH = nodes.add("Reshape", [x_RH, stack.shape])
    if version.compute != "fp32":
        x_BSH = nodes.add("Cast", [x_BSH], attributes={"to": TensorProto.FLOAT})
    nodes.return_as(x_BSH, HIDDEN)
    return make_model("albert_encoder", nodes, _inputs(), [_hidden(config)])


def _repetitions(config: AlbertConfig) -> list[tuple[_Iteration, int]]:
    """Return the layers of each repeated iteration, and the number of iterations."""
    size = config.num_inner_layers
    plan = config.layer_plan
    iterations = [plan[start : start + size] for start in range(0, len(plan), size)]
    return [(iteration, len(list(run))) for iteration, run in groupby(iterations)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stack:
    """The layers of one encoder, for its graph or for Loop bodies.

    Attributes:
        config: sizes of the model.
        nodes: nodes of the graph.
        shape: name of the shape (B, S, H).
    """

    config: AlbertConfig
    nodes: Nodes
    shape: str

    def apply(self, nodes: Nodes, iteration: _Iteration, x_RH: str) -> str:
        """Append the layers of one iteration to `nodes`."""
        for attention, ffn in iteration:
            x_RH = apply_layer(
                nodes,
                self.config,
                x_RH,
                self.shape,
                _LENGTHS,
                attention=layer_name(attention, self.config),
                ffn=layer_name(ffn, self.config),
            )
        return x_RH

    def loop(self, iteration: _Iteration, num_iterations: int, x_RH: str) -> str:
        """Append a Loop whose body is the layers of one iteration.

        The weights are outside the body: inside, they would be mapped and packed twice.
        """
        scope = f"layer_{iteration[0][0]}/"
        body_nodes = Nodes(
            self.nodes.initializers, rows=self.nodes.rows, scope=scope, outer=self.nodes
        )
        out_RH = self.apply(body_nodes, iteration, f"{scope}x")
        condition = body_nodes.add("Identity", [f"{scope}condition"])
        body = helper.make_graph(
            body_nodes.protos,
            f"{scope}body",
            [
                helper.make_tensor_value_info(f"{scope}iteration", TensorProto.INT64, []),
                helper.make_tensor_value_info(f"{scope}condition", TensorProto.BOOL, []),
                self._rows(f"{scope}x"),
            ],
            [helper.make_tensor_value_info(condition, TensorProto.BOOL, []), self._rows(out_RH)],
        )
        count = self.nodes.constant(f"{scope}num_iterations", np.array(num_iterations, np.int64))
        start = self.nodes.constant(f"{scope}start", np.array(True))
        return self.nodes.add("Loop", [count, start, x_RH], attributes={"body": body})

    def _rows(self, name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(
            name, self.nodes.version.data_type, ["rows", self.config.hidden_size]
        )


def _hidden(config: AlbertConfig) -> ValueInfoProto:
    shape: list[str | int | None] = ["batch", "sequence", config.hidden_size]
    return helper.make_tensor_value_info(HIDDEN, TensorProto.FLOAT, shape)


def _inputs() -> list[ValueInfoProto]:
    ids = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"])
        for name in ("input_ids", "token_type_ids")
    ]
    return [*ids, helper.make_tensor_value_info(_LENGTHS, TensorProto.INT64, ["batch"])]


def build_head(
    config: AlbertConfig,
    head: str,
    num_outputs: int,
    tensors: Mapping[str, StoredTensor],
    version: GraphVersion = CPU_VERSION,
) -> ModelProto:
    """Build the graph (hidden_states (B, S, H), rows (R)) -> logits (R, num_outputs).

    `rows` are int64: row b * S + s is position s of sequence b. A head computes in fp32 in every
    version, because it has few rows.
    """
    initializers = Initializers(tensors, replace(version, compute="fp32"))
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
