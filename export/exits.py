"""The part of an encoder's Loop that ends the pass of each text whose answer is settled.

After each layer a classifier of its own reads the texts' first rows. A text is settled when as many
layers in a row as its `patience` gave the label of the layer before them, or when it has its
`max_layers`: its logits are kept and it leaves the batch, so that the following layers have fewer
rows. The Loop ends when no text is left. A batch in which all texts have all layers skips this.

Shape legend: B texts of the batch, A of them that are not settled, S positions, R rows (A * S),
H hidden size, K labels, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper

from albert_serve.bundle.weights import OUTPUT_LAYERS, exit_name
from albert_serve.config import AlbertConfig
from albert_serve.runtime.encoders import EXIT_LAYERS, EXIT_LOGITS, MAX_LAYERS, PATIENCE
from export.graph import CONTRIB, Nodes
from export.layers import as_rows, linear

# Columns of what does not change while a text is in the Loop.
_COLUMNS: Final = ("index", "length", MAX_LAYERS, PATIENCE)


@dataclass(frozen=True, slots=True)
class ExitState:
    """The state carried from layer to layer beside the hidden states, as names of values.

    Attributes:
        fixed: (A, 4) int64, the columns of `_COLUMNS`.
        label: (A) int64, the last layer's; -1 before the first.
        streak: (A) int64, layers in a row until now with the label of the layer before them.
        logits: (B, K), of the last layer that each text had.
        layers: (B) int64, their number.
    """

    fixed: str
    label: str
    streak: str
    logits: str
    layers: str

    @property
    def names(self) -> list[str]:
        """All names, in this order."""
        return [self.fixed, self.label, self.streak, self.logits, self.layers]

    @classmethod
    def infos(cls, names: Sequence[str]) -> list[ValueInfoProto]:
        """Return the types of values of these names; their sizes change between layers."""
        types = [TensorProto.INT64] * 3 + [TensorProto.FLOAT, TensorProto.INT64]
        ranks = (2, 1, 1, 2, 1)
        return [
            helper.make_tensor_value_info(name, kind, [None] * rank)
            for name, kind, rank in zip(names, types, ranks, strict=True)
        ]

    def lengths(self, nodes: Nodes) -> str:
        """Append the lengths (A)."""
        return _column(nodes, self.fixed, "length")


class ExitNodes:
    """The classifiers of an encoder's layers, and the nodes that read them.

    Args:
        nodes: of the outermost graph, to which what is computed once is appended.
        ids: token ids (B, S).
        lengths: (B).
    """

    def __init__(
        self, nodes: Nodes, config: AlbertConfig, num_labels: int, *, ids: str, lengths: str
    ) -> None:
        self._config = config
        first = nodes.constant("position_axis", np.array([0], np.int64))
        names = [exit_name(number) for number in range(config.num_layers - 1)]
        names.append(OUTPUT_LAYERS["text-classification"])
        self._weight_LKH, self._bias_LK = (
            nodes.add(
                "Concat",
                [nodes.add("Unsqueeze", [nodes.weight(f"{n}.{kind}"), first]) for n in names],
                attributes={"axis": 0},
            )
            for kind in ("weight", "bias")
        )
        self._first = nodes.constant("first", np.array(0, np.int64))
        self._one = nodes.constant("one_layer", np.array(1, np.int64))
        self._num_layers = nodes.constant("num_turns", np.array(config.num_layers, np.int64))
        least = nodes.add(
            "ReduceMin",
            [nodes.add("Min", [MAX_LAYERS, PATIENCE])],
            attributes={"keepdims": 0},
        )
        self._is_early = nodes.add("Less", [least, self._num_layers])
        self.start = self._start(nodes, num_labels, ids, lengths)

    def _start(self, nodes: Nodes, num_labels: int, ids: str, lengths: str) -> ExitState:
        last = nodes.constant("last_axis", np.array([-1], np.int64))
        count = nodes.add("Shape", [ids], attributes={"start": 0, "end": 1})
        index = nodes.add("Range", [self._first, nodes.add("Squeeze", [count]), self._one])
        columns = [
            nodes.add("Unsqueeze", [value, last])
            for value in (index, lengths, MAX_LAYERS, PATIENCE)
        ]
        labels = nodes.constant("num_labels", np.array([num_labels], np.int64))
        sizes = nodes.add("Concat", [count, labels], attributes={"axis": 0})
        none = nodes.constant("no_label", np.array(-1, np.int64))
        zero = nodes.constant("no_logit", np.array(0, np.float32))
        return ExitState(
            fixed=nodes.add("Concat", columns, attributes={"axis": 1}),
            label=nodes.add("Expand", [none, count]),
            streak=nodes.add("Expand", [self._first, count]),
            logits=nodes.add("Expand", [zero, sizes]),
            layers=nodes.add("Expand", [self._num_layers, count]),
        )

    def settle(
        self, nodes: Nodes, texts: ExitState, out_RH: str, shape: str, turn: str
    ) -> list[str]:
        """Append the reading of the hidden states after a layer to a Loop's body.

        Args:
            shape: (-1, S, H).
            turn: the layer's number from 0.

        Returns:
            Whether to go on, the hidden states and `ExitState.names`, all after this layer.
        """
        early = self._early(nodes, texts, out_RH, shape, turn)
        whole = _whole(nodes, texts, out_RH, self._config.hidden_size)
        outputs = [f"{nodes.scope}after/{name}" for name in ("go_on", "x", *ExitState.__slots__)]
        choice = helper.make_node(
            "If", [self._is_early], outputs, then_branch=early, else_branch=whole
        )
        nodes.protos.append(choice)
        return outputs

    def _early(
        self, outer: Nodes, texts: ExitState, out_RH: str, shape: str, turn: str
    ) -> GraphProto:
        """The branch of a batch in which a text may have fewer layers than all."""
        nodes = Nodes(outer.initializers, rows=texts.label, scope=f"{outer.scope}early/")
        out_ASH = nodes.add("Reshape", [out_RH, shape])
        logits_AK = self._classify(nodes, out_ASH, turn)
        label_A = nodes.add("ArgMax", [logits_AK], attributes={"axis": -1, "keepdims": 0})
        is_same_A = nodes.add("Equal", [label_A, texts.label])
        is_same_A = nodes.add("Cast", [is_same_A], attributes={"to": TensorProto.INT64})
        streak_A = nodes.add("Mul", [nodes.add("Add", [texts.streak, self._one]), is_same_A])
        depth = nodes.add("Add", [turn, self._one])
        index, most, patience = (
            _column(nodes, texts.fixed, name) for name in ("index", MAX_LAYERS, PATIENCE)
        )
        agreed_A = nodes.add("GreaterOrEqual", [streak_A, patience])
        full_A = nodes.add("GreaterOrEqual", [depth, most])
        goes_on_A = nodes.add("Not", [nodes.add("Or", [agreed_A, full_A])])
        # The heads of other tasks read what has had all layers.
        is_last = nodes.add("Equal", [depth, self._num_layers])
        stays_A = nodes.add("Or", [goes_on_A, is_last])
        last = nodes.constant("last_axis", np.array([-1], np.int64))
        place_A1 = nodes.add("Unsqueeze", [index, last])
        depth_A = nodes.add("Expand", [depth, nodes.add("Shape", [index])])
        x_ASH = _take(nodes, out_ASH, stays_A)
        results = [
            _any(nodes, goes_on_A),
            as_rows(nodes, x_ASH, self._config.hidden_size),
            *(_take(nodes, value, goes_on_A) for value in (texts.fixed, label_A, streak_A)),
            nodes.add("ScatterND", [texts.logits, place_A1, logits_AK]),
            nodes.add("ScatterND", [texts.layers, place_A1, depth_A]),
        ]
        return _branch(nodes, results, self._config.hidden_size)

    def _classify(self, nodes: Nodes, out_ASH: str, turn: str) -> str:
        """The logits (A, K) of the classifier after this layer."""
        cls_AH = nodes.add("Gather", [out_ASH, self._first], attributes={"axis": 1})
        pooled_AH = nodes.add("Tanh", [linear(nodes, cls_AH, "albert.pooler")])
        weight_KH = nodes.add("Gather", [self._weight_LKH, turn])
        product_AK = nodes.add(
            "FusedMatMul", [pooled_AH, weight_KH], domain=CONTRIB, attributes={"transB": 1}
        )
        return nodes.add("Add", [product_AK, nodes.add("Gather", [self._bias_LK, turn])])


def _whole(outer: Nodes, texts: ExitState, out_RH: str, hidden_size: int) -> GraphProto:
    """The branch of a batch in which all texts have all layers."""
    nodes = Nodes(outer.initializers, rows=texts.label, scope=f"{outer.scope}whole/")
    go_on = nodes.constant("go_on", np.array(True))
    results = [nodes.add("Identity", [each]) for each in (go_on, out_RH, *texts.names)]
    return _branch(nodes, results, hidden_size)


def _branch(nodes: Nodes, results: Sequence[str], hidden_size: int) -> GraphProto:
    go_on, x_RH, *rest = results
    outputs = [
        helper.make_tensor_value_info(go_on, TensorProto.BOOL, []),
        helper.make_tensor_value_info(x_RH, TensorProto.FLOAT, [None, hidden_size]),
        *ExitState.infos(rest),
    ]
    return helper.make_graph(nodes.protos, f"{nodes.scope}branch", [], outputs)


def _column(nodes: Nodes, fixed: str, name: str) -> str:
    number = nodes.constant(f"column_{name}", np.array(_COLUMNS.index(name), np.int64))
    return nodes.add("Gather", [fixed, number], attributes={"axis": 1})


def _take(nodes: Nodes, value: str, condition_A: str) -> str:
    return nodes.add("Compress", [value, condition_A], attributes={"axis": 0})


def _any(nodes: Nodes, condition_A: str) -> str:
    numbers = nodes.add("Cast", [condition_A], attributes={"to": TensorProto.INT32})
    most = nodes.add("ReduceMax", [numbers], attributes={"keepdims": 0})
    return nodes.add("Cast", [most], attributes={"to": TensorProto.BOOL})


def exit_inputs() -> list[ValueInfoProto]:
    """The limits of each text, which the graph takes beside its tokens."""
    return [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch"])
        for name in (MAX_LAYERS, PATIENCE)
    ]


def exit_outputs(num_labels: int) -> list[ValueInfoProto]:
    """The logits of each text after its last layer, and the number of its layers."""
    return [
        helper.make_tensor_value_info(EXIT_LOGITS, TensorProto.FLOAT, ["batch", num_labels]),
        helper.make_tensor_value_info(EXIT_LAYERS, TensorProto.INT64, ["batch"]),
    ]
