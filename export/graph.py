"""ONNX graphs whose weights are ranges of one safetensors file.

A graph contains no weights: each initializer is external data, and all nodes that read a weight
share its initializer. A weight that is not stored in the graph's compute type is converted once, at
the start of the graph. The runtime computes this conversion when it loads the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

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
from albert_serve.bundle.manifest import WEIGHTS_FILE, ComputePrecision
from albert_serve.bundle.weights import SCALE_SUFFIX, SMOOTHING_SUFFIX, StoredTensor, stored_name

CONTRIB: Final = "com.microsoft"
# Version 24 is the first whose Attention takes the lengths of right-padded sequences.
_OPSETS: Final = {"": 24, CONTRIB: 1}
_IR_VERSION: Final = 11

Compute = ComputePrecision
Attributes = Mapping[str, int | float | Sequence[int] | GraphProto]

# ONNX's number of each type, by the type's name in safetensors.
_DATA_TYPES: Final = {
    "F32": TensorProto.FLOAT,
    "F16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "I8": TensorProto.INT8,
}
_COMPUTE_TYPES: Final[dict[Compute, str]] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
# Operators that only move values, so their outputs need no rounding.
_MOVES: Final = frozenset({"Gather", "Reshape", "Slice", "Transpose", "Unsqueeze"})
_NOT_VALUES: Final = frozenset({"Shape"})


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphVersion:
    """The version of a graph, for a device and a precision.

    Attributes:
        kernels: device whose fast operators the graph uses. Repeated layers are a Loop for a CPU
            and unrolled for CUDA (`export/models.py`).
        compute: precision of the computation.
    """

    kernels: Literal["cpu", "cuda"] = "cpu"
    compute: Compute = "fp32"

    @property
    def dtype(self) -> str:
        """The name of `compute` in safetensors."""
        return _COMPUTE_TYPES[self.compute]

    @property
    def data_type(self) -> int:
        """The number of `compute` in ONNX."""
        return int(_DATA_TYPES[self.dtype])


CPU_VERSION: Final = GraphVersion()
CUDA_VERSION: Final = GraphVersion(kernels="cuda", compute="fp16")


class Initializers:
    """The initializers of a model, one for each tensor, and the nodes that convert them."""

    def __init__(
        self, tensors: Mapping[str, StoredTensor], version: GraphVersion = CPU_VERSION
    ) -> None:
        self.version = version
        self._tensors = tensors
        self._protos: dict[str, TensorProto] = {}
        self._converted: dict[str, NodeProto] = {}

    def dtype(self, name: str) -> str:
        """Return the safetensors type of a stored weight, by its Hugging Face name."""
        return self._tensors[stored_name(name, self._tensors)].dtype

    def smoothing(self, name: str) -> str | None:
        """Add an int8 weight's smoothing factors (I), if any; return their name, or None."""
        factors = stored_name(name + SMOOTHING_SUFFIX, self._tensors)
        return self.add_stored(factors) if factors in self._tensors else None

    def add_stored(self, name: str) -> str:
        """Add a weight as it is stored, by its Hugging Face name; return the initializer's name."""
        name = stored_name(name, self._tensors)
        if name not in self._protos:
            self._protos[name] = _external_tensor(name, self._tensors[name])
        return name

    def weight(self, name: str) -> str:
        """Add a weight in the graph's compute type, by its Hugging Face name."""
        initializer = self.add_stored(name)
        dtype = self._tensors[initializer].dtype
        if dtype == "I8":
            scale = self.add_stored(name + SCALE_SUFFIX)
            restored = self._convert(
                "DequantizeLinear", [initializer, scale], f"{initializer}/restored", axis=1
            )
            full = self._convert("Transpose", [restored], f"{initializer}/full", perm=[1, 0])
            factors = self.smoothing(name)
            if factors is not None:
                full = self._convert("Mul", [full, factors], f"{initializer}/unsmoothed")
            initializer, dtype = full, "F32"
        if dtype == self.version.dtype:
            return initializer
        converted = f"{initializer}/{self.version.compute}"
        return self._convert("Cast", [initializer], converted, to=self.version.data_type)

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add a constant of a few bytes to the graph itself."""
        self._protos[name] = numpy_helper.from_array(value, name)
        return name

    @property
    def protos(self) -> list[TensorProto]:
        """All initializers, in order of first use."""
        return list(self._protos.values())

    @property
    def conversions(self) -> list[NodeProto]:
        """The nodes that convert stored weights to the compute type."""
        return list(self._converted.values())

    def _convert(self, op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        if name not in self._converted:
            self._converted[name] = helper.make_node(op, inputs, [name], **attributes)
        return name


class Nodes:
    """The nodes of one graph, or of one Loop body, in order of execution.

    Args:
        initializers: initializers of the model.
        rows: name of a value in the outermost graph that has one element per row (R).
        scope: prefix of this graph's value names, unique in the model.
        outer: nodes of the outermost graph, if these are the nodes of a Loop body.
    """

    def __init__(
        self,
        initializers: Initializers,
        *,
        rows: str,
        scope: str = "",
        outer: Nodes | None = None,
    ) -> None:
        self.initializers = initializers
        self.rows = rows
        self.scope = scope
        self.outer = outer or self
        self.protos: list[NodeProto] = []

    @property
    def version(self) -> GraphVersion:
        """The version of the graph."""
        return self.initializers.version

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        *,
        domain: str = "",
        attributes: Attributes | None = None,
    ) -> str:
        """Append a node with one output, or reuse an identical node.

        Returns:
            Name of the output.
        """
        node = helper.make_node(op, inputs, [], domain=domain)
        for key, value in (attributes or {}).items():
            node.attribute.append(helper.make_attribute(key, value))
        for existing in self.protos:
            content = (existing.op_type, existing.input, existing.attribute)
            if content == (op, node.input, node.attribute):
                return str(existing.output[0])
        output = f"{self.scope}{op}_{len(self.protos)}"
        node.output.append(output)
        self.protos.append(node)
        return output

    def weight(self, name: str) -> str:
        """Add a weight in the graph's compute type, by its Hugging Face name."""
        return self.initializers.weight(name)

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add a constant of a few bytes."""
        return self.initializers.constant(name, value)

    def return_as(self, value: str, name: str) -> None:
        """Rename the output of the node that computes `value`."""
        producer = next(node for node in self.protos if value in node.output)
        producer.output[list(producer.output).index(value)] = name


def make_model(
    name: str, nodes: Nodes, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]
) -> ModelProto:
    """Build the model of these nodes and their initializers."""
    graph = helper.make_graph(
        [*nodes.initializers.conversions, *nodes.protos],
        name,
        inputs,
        outputs,
        initializer=nodes.initializers.protos,
    )
    model: ModelProto = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, number) for domain, number in _OPSETS.items()],
        ir_version=_IR_VERSION,
        producer_name="albert-serve",
        producer_version=albert_serve.__version__,
    )
    return model


def _external_tensor(name: str, tensor: StoredTensor) -> TensorProto:
    proto = TensorProto(name=name, data_type=_DATA_TYPES[tensor.dtype], dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    location = {"location": WEIGHTS_FILE, "offset": tensor.offset, "length": tensor.num_bytes}
    for key, value in location.items():
        proto.external_data.add(key=key, value=str(value))
    return proto


def emulate_rounding(model: ModelProto, version: GraphVersion) -> ModelProto:
    """Return a graph that emulates another graph's precision on a CPU.

    A CPU lacks fp16 and bf16 kernels. So each operator computes in fp32, and its result is
    rounded, as GPU kernels that accumulate in fp32 do. A value that is too large for fp16
    becomes infinite. Rounding inside a kernel, such as attention's probabilities, is not emulated.
    """
    if version.compute == "fp32":
        return model
    emulated = ModelProto()
    emulated.CopyFrom(model)
    graph = emulated.graph
    nodes, values, renamed = [], set(), {}
    for tensor in graph.initializer:
        if tensor.data_type == version.data_type:
            renamed[tensor.name] = f"{tensor.name}/full"
            nodes.append(_cast(tensor.name, renamed[tensor.name], TensorProto.FLOAT))
            values.add(renamed[tensor.name])
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        nodes.append(node)
        if _is_rounded(node, values, version):
            values.update(node.output)
            if node.op_type not in _MOVES:
                nodes += _round(node, version)
    del graph.node[:]
    graph.node.extend(nodes)
    return emulated


def _is_rounded(node: NodeProto, values: set[str], version: GraphVersion) -> bool:
    """Return whether a node's output has the version's compute type."""
    if node.op_type == "Cast":
        return bool(node.attribute[0].i == version.data_type)
    return node.op_type not in _NOT_VALUES and not values.isdisjoint(node.input)


def _round(node: NodeProto, version: GraphVersion) -> list[NodeProto]:
    """Rename a node's output; return the nodes that round it and restore its name."""
    (name,) = node.output
    unrounded, rounded = f"{name}/unrounded", f"{name}/rounded"
    node.output[:] = [unrounded]
    return [
        _cast(unrounded, rounded, version.data_type),
        _cast(rounded, name, TensorProto.FLOAT),
    ]


def _cast(source: str, target: str, data_type: int) -> NodeProto:
    return helper.make_node("Cast", [source], [target], to=data_type)
