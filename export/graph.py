"""ONNX graphs whose weights are ranges of one safetensors file.

A graph built here holds no weight: each initializer is external data, described once however many
nodes read it. What is stored in another type than the graph computes in is converted once, at its
beginning, which the runtime does when it loads the graph.
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
# 24 is the first whose Attention takes the lengths of right-padded sequences.
_OPSETS: Final = {"": 24, CONTRIB: 1}
_IR_VERSION: Final = 11

Compute = ComputePrecision
Attributes = Mapping[str, int | float | Sequence[int] | GraphProto]

# safetensors' names of types, and ONNX's numbers.
_DATA_TYPES: Final = {
    "F32": TensorProto.FLOAT,
    "F16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "I8": TensorProto.INT8,
}
_COMPUTE_TYPES: Final[dict[Compute, str]] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
# They pass values on as they are.
_MOVES: Final = frozenset({"Gather", "Reshape", "Slice", "Transpose", "Unsqueeze"})
_NOT_VALUES: Final = frozenset({"Shape"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The form of a graph.

    Attributes:
        kernels: the device whose fast operators are used; the others' are slower there, or missing.
            Layers that are applied several times in a row are a Loop on a CPU, and one after
            another for CUDA (`export/models.py`).
        compute: the type that it computes in.
    """

    kernels: Literal["cpu", "cuda"] = "cpu"
    compute: Compute = "fp32"

    @property
    def dtype(self) -> str:
        """`compute` as safetensors calls it."""
        return _COMPUTE_TYPES[self.compute]

    @property
    def data_type(self) -> int:
        """`compute` as ONNX numbers it."""
        return int(_DATA_TYPES[self.dtype])


CPU_FORM: Final = Form()
CUDA_FORM: Final = Form(kernels="cuda", compute="fp16")


class Initializers:
    """The initializers of one model, each tensor once, and the nodes that convert them."""

    def __init__(self, stored: Mapping[str, StoredTensor], form: Form = CPU_FORM) -> None:
        self.form = form
        self._stored = stored
        self._protos: dict[str, TensorProto] = {}
        self._converted: dict[str, NodeProto] = {}

    def dtype(self, name: str) -> str:
        """Return the stored type (safetensors' name) of the weight of this Hugging Face name."""
        return self._stored[stored_name(name, self._stored)].dtype

    def smoothing(self, name: str) -> str | None:
        """Add the factors (I) of the inputs of this int8 weight, if it has any."""
        factors = name + SMOOTHING_SUFFIX
        return self.stored(factors) if stored_name(factors, self._stored) in self._stored else None

    def stored(self, name: str) -> str:
        """Add the weight of this Hugging Face name as stored; return the initializer's name."""
        name = stored_name(name, self._stored)
        if name not in self._protos:
            self._protos[name] = _external_tensor(name, self._stored[name])
        return name

    def weight(self, name: str) -> str:
        """Add the weight of this Hugging Face name in the graph's compute type."""
        initializer = self.stored(name)
        dtype = self._stored[initializer].dtype
        if dtype == "I8":
            scale = self.stored(name + SCALE_SUFFIX)
            restored = self._convert(
                "DequantizeLinear", [initializer, scale], f"{initializer}/restored", axis=1
            )
            full = self._convert("Transpose", [restored], f"{initializer}/full", perm=[1, 0])
            factors = self.smoothing(name)
            if factors is not None:
                full = self._convert("Mul", [full, factors], f"{initializer}/unsmoothed")
            initializer, dtype = full, "F32"
        if dtype == self.form.dtype:
            return initializer
        kind = self.form.compute
        return self._convert("Cast", [initializer], f"{initializer}/{kind}", to=self.form.data_type)

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add a constant of a few bytes, stored in the graph itself."""
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
        rows: a value of the outermost graph with one element for each row (R); empty in a graph
            without Loops whose products are of several numbers of rows.
        scope: the beginning of this graph's value names; no two graphs of a model share one.
        outer: the nodes of the outermost graph, where these are a Loop body's.
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
    def form(self) -> Form:
        """The form of the graph."""
        return self.initializers.form

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        *,
        domain: str = "",
        attributes: Attributes | None = None,
    ) -> str:
        """Append a node of one output; an identical node is reused.

        Returns:
            The output's name.
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
        """Add the weight of this Hugging Face name in the graph's compute type."""
        return self.initializers.weight(name)

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add a constant of a few bytes."""
        return self.initializers.constant(name, value)

    def return_as(self, value: str, name: str) -> None:
        """Rename the output of the node that computes `value`."""
        maker = next(node for node in self.protos if value in node.output)
        maker.output[list(maker.output).index(value)] = name


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


def _external_tensor(name: str, stored: StoredTensor) -> TensorProto:
    tensor = TensorProto(name=name, data_type=_DATA_TYPES[stored.dtype], dims=stored.shape)
    tensor.data_location = TensorProto.EXTERNAL
    place = {"location": WEIGHTS_FILE, "offset": stored.offset, "length": stored.num_bytes}
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def rounded(model: ModelProto, form: Form) -> ModelProto:
    """Return a graph of this form that a CPU computes: values in fp32, rounded to the form's type.

    A CPU has no kernels for some of its operators. Each computes in fp32 and its result is rounded,
    as by kernels on a GPU that accumulate in fp32: what is too large for fp16 becomes infinite.
    Roundings inside of a kernel, such as attention's probabilities, are not emulated.
    """
    if form.compute == "fp32":
        return model
    emulated = ModelProto()
    emulated.CopyFrom(model)
    graph = emulated.graph
    nodes, values, renamed = [], set(), {}
    for tensor in graph.initializer:
        if tensor.data_type == form.data_type:
            renamed[tensor.name] = f"{tensor.name}/full"
            nodes.append(_cast(tensor.name, renamed[tensor.name], TensorProto.FLOAT))
            values.add(renamed[tensor.name])
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        nodes.append(node)
        if _is_rounded(node, values, form):
            values.update(node.output)
            if node.op_type not in _MOVES:
                nodes += _round(node, form)
    del graph.node[:]
    graph.node.extend(nodes)
    return emulated


def _is_rounded(node: NodeProto, values: set[str], form: Form) -> bool:
    """Whether a node's output is of the form's type."""
    if node.op_type == "Cast":
        return bool(node.attribute[0].i == form.data_type)
    return node.op_type not in _NOT_VALUES and not values.isdisjoint(node.input)


def _round(node: NodeProto, form: Form) -> list[NodeProto]:
    """Have a node write to another name; return the nodes that round it to its own."""
    (name,) = node.output
    small = f"{name}/small"
    back = _cast(small, name, TensorProto.FLOAT)
    if node.op_type == "Cast":
        node.output[:] = [small]
        return [back]
    node.output[:] = [f"{name}/unrounded"]
    return [_cast(node.output[0], small, form.data_type), back]


def _cast(source: str, target: str, data_type: int) -> NodeProto:
    return helper.make_node("Cast", [source], [target], to=data_type)
