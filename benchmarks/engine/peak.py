"""A process that measures the machine's peak: plain square matrix products.

torch multiplies fp32 with MKL, which is slow on processors that are not Intel's; oneDNN and ONNX
Runtime are asked, too. The fastest product is found once, and measured again at each request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from benchmarks.engine.contestants import Peak
from benchmarks.harness.process import Channel
from training.system.precision import cpu_has_bf16

_SIZES: Final = (1024, 2048)
_MEASURE_S: Final = 0.1
_LEAST_CALLS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A library's product of two square matrices."""

    library: str
    size: int
    multiply: Callable[[], object]

    def measure(self) -> float:
        """Return the best of some calls, floating-point operations a second."""
        began, best, num_calls = time.perf_counter(), np.inf, 0
        while num_calls < _LEAST_CALLS or time.perf_counter() - began < _MEASURE_S:
            before = time.perf_counter()
            self.multiply()
            best = min(best, time.perf_counter() - before)
            num_calls += 1
        return float(2 * self.size**3 / best)

    def __str__(self) -> str:
        return f"{self.library}, {self.size} wide"


def _fastest(products: Iterator[Product]) -> Product:
    speeds: list[tuple[float, Product]] = []
    for product in products:
        product.multiply()
        speeds.append((product.measure(), product))
    return max(speeds, key=lambda pair: pair[0])[1]


def _fp32_products(num_threads: int) -> Iterator[Product]:
    for size in _SIZES:
        torch.manual_seed(0)
        one, other = torch.randn(size, size), torch.randn(size, size)
        multiply: dict[str, Callable[[], object]] = {
            "torch": _product(one, other),
            "numpy": _product(one.numpy(), other.numpy()),
            "ONNX Runtime": _ort_product(one.numpy(), other.numpy(), num_threads),
        }
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            multiply["oneDNN"] = _onednn_product(one, other)
        for library, each in multiply.items():
            yield Product(library=library, size=size, multiply=each)


def _bf16_products() -> Iterator[Product]:
    for size in _SIZES:
        matrix = torch.randn(size, size).bfloat16()
        yield Product(library="torch", size=size, multiply=_product(matrix, matrix))


def _product(one: Tensor | np.ndarray, other: Tensor | np.ndarray) -> Callable[[], object]:
    return lambda: one @ other


def _onednn_product(one: Tensor, other: Tensor) -> Callable[[], object]:
    opaque, weight = one.to_mkldnn(), other.to_mkldnn()
    return lambda: torch.nn.functional.linear(opaque, weight)


def _ort_product(one: np.ndarray, other: np.ndarray, num_threads: int) -> Callable[[], object]:
    shape = list(one.shape)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(other, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, {"x": one})


def serve(channel: Channel, num_threads: int) -> None:
    """Measure at each message."""
    torch.set_num_threads(num_threads)
    fp32 = _fastest(_fp32_products(num_threads))
    # Emulated, one product of bf16 takes minutes.
    bf16 = _fastest(_bf16_products()) if cpu_has_bf16() else None
    channel.send("ready")
    while channel.receive() is not None:
        channel.send(
            Peak(
                fp32=fp32.measure(),
                bf16=bf16.measure() if bf16 else 0.0,
                fp32_by=str(fp32),
                bf16_by=str(bf16) if bf16 else "",
            )
        )
