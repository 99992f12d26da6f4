"""ONNX graphs whose weights are ranges of one safetensors file.

A graph built here holds no weight: each initializer is external data, described once however many
nodes read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

import albert_serve
from albert_serve.bundle import WEIGHTS_FILE
from albert_serve.weights import StoredTensor, stored_name

CONTRIB: Final = "com.microsoft"
_OPSETS: Final = {"": 18, CONTRIB: 1}
_IR_VERSION: Final = 10

Attributes = Mapping[str, int | float | GraphProto]


class Initializers:
    """The initializers of one model, each tensor once."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._protos: dict[str, TensorProto] = {}

    def weight(self, name: str) -> str:
        """The stored weight of this Hugging Face name; returns the initializer's name.

        Raises:
            KeyError: the file holds no such weight.
        """
        name = stored_name(name, self._stored)
        if name not in self._protos:
            self._protos[name] = _external_tensor(name, self._stored[name])
        return name

    def constant(self, name: str, value: NDArray[np.int64] | NDArray[np.bool_]) -> str:
        """A constant of a few bytes, kept in the graph itself."""
        self._protos[name] = numpy_helper.from_array(value, name)
        return name

    @property
    def protos(self) -> list[TensorProto]:
        """All of them, in order of first use."""
        return list(self._protos.values())


class Nodes:
    """The nodes of one graph, or of one Loop body, in order of execution.

    Args:
        scope: the beginning of this graph's value names; no two graphs of a model share one.
    """

    def __init__(self, initializers: Initializers, scope: str = "") -> None:
        self.initializers = initializers
        self.scope = scope
        self.protos: list[NodeProto] = []

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        *,
        domain: str = "",
        attributes: Attributes | None = None,
    ) -> str:
        """Append a node of one output; returns the output's name."""
        name = f"{self.scope}{op}_{len(self.protos)}"
        node = helper.make_node(op, inputs, [name], name=name, domain=domain)
        for key, value in (attributes or {}).items():
            node.attribute.append(helper.make_attribute(key, value))
        self.protos.append(node)
        return name

    def weight(self, name: str) -> str:
        """The stored weight of this Hugging Face name."""
        return self.initializers.weight(name)

    def return_as(self, value: str, name: str) -> None:
        """Give the node that made `value` the output name that the graph promises."""
        maker = next(node for node in self.protos if value in node.output)
        maker.output[list(maker.output).index(value)] = name


def make_model(
    name: str, nodes: Nodes, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]
) -> ModelProto:
    """The model of these nodes and of all initializers that they read."""
    graph = helper.make_graph(
        nodes.protos, name, inputs, outputs, initializer=nodes.initializers.protos
    )
    model: ModelProto = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, number) for domain, number in _OPSETS.items()],
        ir_version=_IR_VERSION,
        producer_name="albert-serve",
        producer_version=albert_serve.__version__,
    )
    return model


def _external_tensor(name: str, stored: StoredTensor) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=stored.shape)
    tensor.data_location = TensorProto.EXTERNAL
    place = {"location": WEIGHTS_FILE, "offset": stored.offset, "length": stored.num_bytes}
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor
