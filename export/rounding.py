"""Emulation of a graph in fp16 or bf16 on a CPU, which has no kernels for some of its operators.

Each operator computes in fp32, and its result is rounded to the graph's type, as kernels on a GPU
do that accumulate in fp32: what is too large for fp16 becomes infinite here too. Roundings inside
of a kernel, such as attention's probabilities, are not emulated.
"""

from __future__ import annotations

from typing import Final

from onnx import ModelProto, NodeProto, TensorProto, helper

from export.graph import Form

# They pass values on as they are.
_MOVES: Final = frozenset({"Gather", "Reshape", "Slice", "Transpose", "Unsqueeze"})
_NOT_VALUES: Final = frozenset({"Shape"})


def rounded(model: ModelProto, form: Form) -> ModelProto:
    """Return a graph of this form with each value in fp32, rounded to the form's type."""
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
