"""Graphs of the heads: gathered rows of hidden states to rows of logits.

The rows of a start-conditioned head are those of whole windows: [CLS] and where an answer can be.
Which rows are of one window is told by the sequence that they are in.

Shape legend: B sequences, S positions, R rows asked for, H hidden size, E embedding size,
V vocabulary, K outputs, T starts in a beam, N = B * S, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from onnx import ModelProto, TensorProto, helper

from albert_serve.bundle.weights import (
    NUM_BEAMS,
    UNPOOLED_TASKS,
    WORDS,
    StoredTensor,
    output_layer,
    question_head_of,
)
from albert_serve.config import AlbertConfig
from export.encoder import HIDDEN
from export.graph import CPU_FORM, Form, Initializers, Nodes, make_model
from export.layers import activate, as_rows, flatten, linear, matmul, multiply, norm

# The logit of a position where no answer can start; below any other, and finite.
_NO_LOGIT: Final = -1e30


def build_head(
    config: AlbertConfig,
    head: str,
    num_outputs: int,
    stored: Mapping[str, StoredTensor],
    form: Form = CPU_FORM,
) -> ModelProto:
    """Build (hidden_states (B, S, H), rows (R)) -> logits (R, num_outputs), with the pooler.

    `rows` are int64: row b * S + s is position s of sequence b. A head computes in fp32 in every
    form, since its rows are few. A start-conditioned head takes all rows of a window together.
    """
    has_beams = question_head_of(head, num_outputs) == "start-conditioned"
    initializers = Initializers(stored, replace(form, compute="fp32"))
    nodes = Nodes(initializers, rows="" if has_beams else "rows")
    rows_RH = nodes.add("Gather", [as_rows(nodes, HIDDEN, config.hidden_size), "rows"])
    if head == "fill-mask":
        logits_RK = _fill_mask(nodes, config, rows_RH)
    elif has_beams:
        logits_RK = _start_conditioned(nodes, config, rows_RH, "rows")
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


def _start_conditioned(nodes: Nodes, config: AlbertConfig, rows_RH: str, rows_R: str) -> str:
    """Logits (R, 2 + T) of rows: start, answerability, and the end given each of the best starts.

    In a window with fewer rows than T, the last ends are given starts that are none.
    """
    start_R1 = linear(nodes, rows_RH, "start_logits.dense")
    start_BS = _in_place(nodes, config, flatten(nodes, start_R1), rows_R)
    starts_BTH = _best(nodes, start_BS)
    num_positions = nodes.add("Shape", [HIDDEN], attributes={"start": 1, "end": 2})
    sequence_R = nodes.add("Div", [rows_R, num_positions])
    answer_B1 = _answerability(nodes, config, start_BS)
    answer_R1 = nodes.add("Gather", [answer_B1, sequence_R])
    end_RT = _ends(nodes, config, rows_RH, starts_BTH, sequence_R)
    return nodes.add("Concat", [start_R1, answer_R1, end_RT], attributes={"axis": 1})


def _in_place(nodes: Nodes, config: AlbertConfig, start_R: str, rows_R: str) -> str:
    """The start logits at their positions, (B, S); very low at all others."""
    all_NH = as_rows(nodes, HIDDEN, config.hidden_size)
    size = nodes.add("Shape", [all_NH], attributes={"start": 0, "end": 1})
    low = nodes.constant("no_logit", np.array(_NO_LOGIT, np.float32))
    low_N = nodes.add("Expand", [low, size])
    start_N = nodes.add("ScatterElements", [low_N, rows_R, start_R], attributes={"axis": 0})
    shape = nodes.add("Shape", [HIDDEN], attributes={"start": 0, "end": 2})
    return nodes.add("Reshape", [start_N, shape])


def _best(nodes: Nodes, start_BS: str) -> str:
    """The hidden states of the best starts of each sequence, (B, T, H); of equal ones the first."""
    count = nodes.add("Shape", [HIDDEN], attributes={"start": 0, "end": 1})
    beams = nodes.constant("num_beams", np.array([NUM_BEAMS], np.int64))
    # A sequence may have fewer positions than the beam.
    more = nodes.add("Concat", [count, beams], attributes={"axis": 0})
    low = nodes.constant("no_logit", np.array(_NO_LOGIT, np.float32))
    padded = nodes.add(
        "Concat", [start_BS, nodes.add("Expand", [low, more])], attributes={"axis": 1}
    )
    top = helper.make_node("TopK", [padded, beams], ["best_logits", "best_places"])
    nodes.protos.append(top)
    one = nodes.constant("one_position", np.array([1], np.int64))
    num_positions = nodes.add("Shape", [HIDDEN], attributes={"start": 1, "end": 2})
    place_BT = nodes.add("Min", [top.output[1], nodes.add("Sub", [num_positions, one])])
    last = nodes.constant("last_axis", np.array([-1], np.int64))
    place_BT1 = nodes.add("Unsqueeze", [place_BT, last])
    return nodes.add("GatherND", [HIDDEN, place_BT1], attributes={"batch_dims": 1})


def _answerability(nodes: Nodes, config: AlbertConfig, start_BS: str) -> str:
    """The logit of "no answer" of each sequence, (B, 1)."""
    share_BS = nodes.add("Softmax", [start_BS], attributes={"axis": -1})
    middle = nodes.constant("middle_axis", np.array([1], np.int64))
    share_B1S = nodes.add("Unsqueeze", [share_BS, middle])
    summary_BH = as_rows(nodes, nodes.add("MatMul", [share_B1S, HIDDEN]), config.hidden_size)
    first = nodes.constant("first", np.array(0, np.int64))
    cls_BH = nodes.add("Gather", [HIDDEN, first], attributes={"axis": 1})
    pair_BI = nodes.add("Concat", [summary_BH, cls_BH], attributes={"axis": 1})
    dense_BH = nodes.add("Tanh", [linear(nodes, pair_BI, "answer_class.dense_0")])
    return multiply(nodes, dense_BH, "answer_class.dense_1.weight")


def _ends(
    nodes: Nodes, config: AlbertConfig, rows_RH: str, starts_BTH: str, sequence_R: str
) -> str:
    """The end logits of rows given each start of their sequence, (R, T).

    The map of a pair (row, start) is the sum of those of (row, 0) and (0, start), so that it takes
    R + B * T products in place of R * T. The starts follow one another: together they would take T
    times the memory.
    """
    size, dense = config.hidden_size, "end_logits.dense_0"
    flat_H = as_rows(nodes, starts_BTH, size)
    zero = nodes.constant("no_state", np.array(0, np.float32))
    zeros_RH = nodes.add("Expand", [zero, nodes.add("Shape", [rows_RH])])
    zeros_H = nodes.add("Expand", [zero, nodes.add("Shape", [flat_H])])
    row_RI = nodes.add("Concat", [rows_RH, zeros_RH], attributes={"axis": 1})
    start_I = nodes.add("Concat", [zeros_H, flat_H], attributes={"axis": 1})
    shape = nodes.constant("beam_shape", np.array([-1, NUM_BEAMS, size], np.int64))
    mapped_BTH = nodes.add("Reshape", [multiply(nodes, start_I, f"{dense}.weight"), shape])
    mapped_RH = linear(nodes, row_RI, dense)
    ends_R1 = []
    for beam in range(NUM_BEAMS):
        number = nodes.constant(f"beam_{beam}", np.array(beam, np.int64))
        start_BH = nodes.add("Gather", [mapped_BTH, number], attributes={"axis": 1})
        start_RH = nodes.add("Gather", [start_BH, sequence_R])
        dense_RH = nodes.add("Tanh", [nodes.add("Add", [mapped_RH, start_RH])])
        normed_RH = norm(nodes, config, dense_RH, "end_logits.LayerNorm")
        ends_R1.append(linear(nodes, normed_RH, "end_logits.dense_1"))
    return nodes.add("Concat", ends_R1, attributes={"axis": 1})
