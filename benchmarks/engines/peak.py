"""A process that measures the machine's peak: plain square matrix products."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from benchmarks.engines.jobs import Job, Opened, Peak
from benchmarks.engines.turns import read_memory
from benchmarks.harness.channel import Channel
from training.system.precision import cpu_has_bf16

_SIZES: Final = (1024, 2048)
_MEASURE_S: Final = 0.1
_LEAST_CALLS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A library's product of two square matrices."""

    name: str
    size: int
    multiply: Callable[[], object]

    def measure(self) -> float:
        """The best of some calls, floating-point operations a second."""
        began, best, num_calls = time.perf_counter(), np.inf, 0
        while num_calls < _LEAST_CALLS or time.perf_counter() - began < _MEASURE_S:
            before = time.perf_counter()
            self.multiply()
            best = min(best, time.perf_counter() - before)
            num_calls += 1
        return float(2 * self.size**3 / best)


class Machine:
    """Finds the fastest product once, and measures it again at each request.

    torch multiplies fp32 with MKL, which is slow on processors that are not Intel's; oneDNN and
    ONNX Runtime are asked, too.
    """

    def __init__(self, num_threads: int) -> None:
        fp32 = _fastest(_fp32_products(num_threads))
        assert fp32 is not None
        self._fp32 = fp32
        # Emulated, one product of bf16 takes minutes.
        self._bf16 = _fastest(_bf16_products()) if cpu_has_bf16() else None

    def measure(self) -> Peak:
        """Both precisions; that of bf16 is 0 where the processor has none."""
        bf16 = self._bf16
        return Peak(
            fp32=self._fp32.measure(),
            bf16=0.0 if bf16 is None else bf16.measure(),
            fp32_by=f"{self._fp32.name}, {self._fp32.size} wide",
            bf16_by="" if bf16 is None else f"{bf16.name}, {bf16.size} wide",
        )


def _fastest(products: Iterator[Product]) -> Product | None:
    best, fastest = 0.0, None
    for product in products:
        product.multiply()
        speed = product.measure()
        if speed > best:
            best, fastest = speed, product
    return fastest


def _fp32_products(num_threads: int) -> Iterator[Product]:
    for size in _SIZES:
        torch.manual_seed(0)
        one, other = torch.randn(size, size), torch.randn(size, size)
        yield Product(name="torch", size=size, multiply=_torch_product(one, other))
        numpy_one, numpy_other = one.numpy(), other.numpy()
        yield Product(name="numpy", size=size, multiply=_numpy_product(numpy_one, numpy_other))
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            yield Product(name="oneDNN", size=size, multiply=_onednn_product(one, other))
        yield Product(
            name="ONNX Runtime",
            size=size,
            multiply=_ort_product(numpy_one, numpy_other, num_threads),
        )


def _bf16_products() -> Iterator[Product]:
    for size in _SIZES:
        matrix = torch.randn(size, size).bfloat16()
        yield Product(name="torch", size=size, multiply=_torch_product(matrix, matrix))


def _torch_product(one: Tensor, other: Tensor) -> Callable[[], object]:
    return lambda: one @ other


def _onednn_product(one: Tensor, other: Tensor) -> Callable[[], object]:
    opaque, weight = one.to_mkldnn(), other.to_mkldnn()
    return lambda: torch.nn.functional.linear(opaque, weight)


def _numpy_product(one: np.ndarray, other: np.ndarray) -> Callable[[], object]:
    return lambda: one @ other


def _ort_product(one: np.ndarray, other: np.ndarray, num_threads: int) -> Callable[[], object]:
    shape = list(one.shape)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(other, "w")],
    )
    model: onnx.ModelProto = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, {"x": one})


def main() -> None:
    """Be the process of the job that the first argument is."""
    channel = Channel()
    job = Job.from_json(sys.argv[1])
    torch.set_num_threads(job.num_threads)
    began = time.perf_counter()
    machine = Machine(job.num_threads)
    opened = Opened(load_s=time.perf_counter() - began, import_bytes=read_memory().rss_bytes)
    channel.send(asdict(opened))
    while channel.receive() is not None:
        channel.send(asdict(machine.measure()))


if __name__ == "__main__":
    main()
