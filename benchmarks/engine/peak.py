"""A process that measures the machine's peak: a plain square matrix product in fp32.

torch multiplies with MKL, which is slow on processors that are not Intel's; oneDNN and ONNX Runtime
are asked, too. The fastest product is found once, and measured again at each request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from benchmarks.harness.process import Channel

# The size of the matrices, and the product.
_Product: TypeAlias = tuple[int, Callable[[], object]]
_SIZES: Final = (1024, 2048)
_MEASURE_S: Final = 0.1
_LEAST_CALLS: Final = 3


def _speed(product: _Product) -> float:
    """Return the best of some calls, floating-point operations a second."""
    size, multiply = product
    began, best, num_calls = time.perf_counter(), np.inf, 0
    while num_calls < _LEAST_CALLS or time.perf_counter() - began < _MEASURE_S:
        before = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - before)
        num_calls += 1
    return float(2 * size**3 / best)


def _products(num_threads: int) -> Iterator[_Product]:
    for size in _SIZES:
        torch.manual_seed(0)
        one, other = torch.randn(size, size), torch.randn(size, size)
        yield size, _torch_product(one, other)
        yield size, _ort_product(one.numpy(), other.numpy(), num_threads)
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            yield size, _onednn_product(one, other)


def _torch_product(one: Tensor, other: Tensor) -> Callable[[], object]:
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
    fastest = max(_products(num_threads), key=_speed)
    channel.send("ready")
    while channel.receive() is not None:
        channel.send(_speed(fastest))
