"""The speed of matrix products on this machine, fp32 and int8, by the runtime's kernels.

It is what a model's speed is held against. A product is a model of one node, written here byte by
byte after onnx.proto (https://protobuf.dev/programming-guides/encoding), for serving has no onnx.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from albert_serve.doctor.timing import time_runs
from albert_serve.runtime.ort import encoder_options
from albert_serve.settings import RuntimeOptions

Kind = Literal["fp32", "int8"]

# Rows, inputs and outputs.
_SIZES: Final = ((128, 768, 3072), (256, 1024, 1024), (512, 1024, 4096))
_BUDGET_S: Final = 0.25  # of one size
_OPSET: Final = 21
_IR_VERSION: Final = 10
# The operator, and onnx.proto's numbers of the types of its inputs and its output.
_FLOAT, _UINT8, _INT8, _INT32 = 1, 2, 3, 6
_NODES: Final[dict[Kind, tuple[str, int, int, int]]] = {
    "fp32": ("MatMul", _FLOAT, _FLOAT, _FLOAT),
    "int8": ("MatMulInteger", _UINT8, _INT8, _INT32),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """Matrix products, each the fastest run of several sizes.

    Attributes:
        fp32_gflops_per_s: additions and multiplications of fp32 numbers, in 10^9 a second.
        int8_gflops_per_s: the same of unsigned and signed 8-bit integers, as int8 bundles have.
    """

    fp32_gflops_per_s: float
    int8_gflops_per_s: float

    @property
    def int8_gain(self) -> float:
        """The speedup of int8 over fp32."""
        return self.int8_gflops_per_s / self.fp32_gflops_per_s


def measure_products(options: RuntimeOptions) -> Products:
    """Measure products on the CPU with a model's number of threads."""
    return Products(
        fp32_gflops_per_s=max(_measure("fp32", size, options) for size in _SIZES),
        int8_gflops_per_s=max(_measure("int8", size, options) for size in _SIZES),
    )


def run_product() -> None:
    """Compute a small product once, to initialise the runtime."""
    _measure("fp32", (1, 64, 64), RuntimeOptions(num_threads=1), budget_s=0.0)


def product_model(kind: Kind, weight: NDArray[Any]) -> bytes:
    """Return an ONNX model that multiplies `x` [rows, I] by a constant [I, O] to `y` [rows, O].

    Args:
        kind: of the product; "int8" takes uint8 rows and gives int32.
        weight: float32 or int8, as the kind has it.
    """
    operator, x_type, weight_type, y_type = _NODES[kind]
    num_in, num_out = weight.shape
    node = _field(1, "x") + _field(1, "w") + _field(2, "y") + _field(4, operator)
    tensor = _field(1, num_in) + _field(1, num_out) + _field(2, weight_type) + _field(8, "w")
    tensor += _field(9, weight.tobytes())
    graph = _field(1, node) + _field(2, "product") + _field(5, tensor)
    graph += _field(11, _value("x", x_type, num_in)) + _field(12, _value("y", y_type, num_out))
    return _field(1, _IR_VERSION) + _field(7, graph) + _field(8, _field(2, _OPSET))


def _measure(
    kind: Kind,
    size: tuple[int, int, int],
    options: RuntimeOptions,
    budget_s: float = _BUDGET_S,
) -> float:
    num_rows, num_in, num_out = size
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 256, (num_rows, num_in), np.uint8)
    weight = generator.integers(-127, 128, (num_in, num_out), np.int8)
    inputs = rows if kind == "int8" else rows.astype(np.float32)
    constant = weight if kind == "int8" else weight.astype(np.float32)
    session = ort.InferenceSession(
        product_model(kind, constant), encoder_options(options), ["CPUExecutionProvider"]
    )
    timing = time_runs(lambda: session.run(None, {"x": inputs}), budget_s=budget_s)
    return 2e-9 * num_rows * num_in * num_out / timing.fastest_s


def _value(name: str, element_type: int, width: int) -> bytes:
    """Return the ValueInfoProto of a matrix with any number of rows."""
    shape = _field(1, _field(2, "rows")) + _field(1, _field(1, width))
    tensor_type = _field(1, element_type) + _field(2, shape)
    return _field(1, name) + _field(2, _field(1, tensor_type))


def _field(number: int, content: int | str | bytes) -> bytes:
    """Encode a message's field: a number, or the length and bytes of any other value."""
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    payload = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _varint(number: int) -> bytes:
    """Encode a varint: seven bits a byte, lowest first, the top bit set in all but the last."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
