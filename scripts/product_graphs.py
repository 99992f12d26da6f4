"""Write the graphs of `albert_serve.doctor.products`: products whose weight is given on opening."""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto, TensorProto, helper

import albert_serve

FOLDER = Path(albert_serve.__file__).parent / "doctor"
# The operator, and the types of its inputs and its output.
_NODES = {
    "fp32": ("MatMul", TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.FLOAT),
    "int8": ("MatMulInteger", TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32),
}


def product_graph(kind: str) -> ModelProto:
    """Return a model that multiplies `x` [rows, I] by the initializer `w` to `y` [rows, O]."""
    operator, x_type, weight_type, y_type = _NODES[kind]
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", x_type, ["rows", "inputs"])],
        [helper.make_tensor_value_info("y", y_type, ["rows", "outputs"])],
        [helper.make_tensor("w", weight_type, [0, 0], b"", raw=True)],
    )
    opset = helper.make_opsetid("", 21)
    model: ModelProto = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    return model


if __name__ == "__main__":
    for kind in _NODES:
        (FOLDER / f"product-{kind}.onnx").write_bytes(product_graph(kind).SerializeToString())
