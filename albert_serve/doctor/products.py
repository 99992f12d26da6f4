"""The speed of matrix products on this machine, fp32 and int8, by the runtime's kernels.

It is what a model's speed is held against. A product is a graph of one node without its weight,
`product-fp32.onnx` or `product-int8.onnx`, which `python -m scripts.product_graphs` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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


class Product:
    """A product of rows `x` [rows, I] and a constant weight [I, O].

    Args:
        kind: "int8" takes uint8 rows and gives int32.
        weight: float32 or int8, as the kind has it.
    """

    def __init__(self, kind: Kind, weight: NDArray[Any], options: RuntimeOptions) -> None:
        # It takes the place of the graph's own, which is empty; the session does not keep it alive.
        self._weight = ort.OrtValue.ortvalue_from_numpy(weight)
        session_options = encoder_options(options)
        session_options.add_initializer("w", self._weight)
        graph = Path(__file__).with_name(f"product-{kind}.onnx").read_bytes()
        self._session = ort.InferenceSession(graph, session_options, ["CPUExecutionProvider"])

    def run(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return the product `y` [rows, O]."""
        y: NDArray[Any] = self._session.run(None, {"x": x})[0]
        return y


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
    product = Product(kind, constant, options)
    timing = time_runs(lambda: product.run(inputs), budget_s=budget_s)
    return 2e-9 * num_rows * num_in * num_out / timing.fastest_s
