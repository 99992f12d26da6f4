"""Peak FLOPs of the device, and model FLOPs utilisation (MFU)."""

from __future__ import annotations

import re
import time
from typing import Final

import torch

from training.system.precision import PrecisionName, product_dtype

# Data sheets: dense products in bf16 (fp16 on V100 and T4, which have no bf16), floating-point
# operations a second. The device's name must have all words of a key; the first match counts.
_DATA_SHEETS: Final[dict[tuple[str, ...], float]] = {
    ("GB200",): 2500e12,
    ("B200",): 2250e12,
    ("GH200",): 989.4e12,
    ("H200", "NVL"): 835.5e12,
    ("H200",): 989.4e12,
    ("H100", "NVL"): 835.5e12,
    ("H100", "PCIe"): 756e12,
    ("H100",): 989.4e12,
    ("A100",): 312e12,
    ("A40",): 149.7e12,
    ("A30",): 165e12,
    ("A10",): 125e12,
    ("L40S",): 362e12,
    ("L40",): 181e12,
    ("L4",): 121e12,
    ("V100", "PCIE"): 112e12,
    ("V100",): 125e12,
    ("T4",): 65e12,
}
_MEASURE_S: Final = 0.5
# A product that takes less time than this is repeated at twice the size.
_PRODUCT_S: Final = 0.02
_SMALLEST: Final = 256
_LARGEST: Final = 8192


def mfu(*, tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Return the model FLOPs utilisation: the model's own FLOPs as a fraction of the peak.

    As defined for PaLM (Chowdhery et al. 2022, appendix B). For several devices give the sum of
    their peaks.
    """
    return tokens_per_s * flops_per_token / peak_flops


def peak_flops(device: torch.device, precision: PrecisionName = "auto") -> float:
    """Return the peak dense FLOPs a second of the device, in training's precision.

    For GPUs in the table it is the data sheet's. For other devices it is the best speed of square
    products within half a second, on a CPU with torch's current number of threads: MFU is then
    relative to a plain product, which overstates it. Random state is unchanged.
    """
    if device.type == "cuda":
        known = data_sheet_flops(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    return _measured_flops(device, precision)


def data_sheet_flops(name: str) -> float | None:
    """Return the peak of the GPU of that name; None for one that the table lacks."""
    words = set(re.split(r"[\s-]+", name))
    if "MIG" in words:  # a part of a GPU
        return None
    return next((peak for key, peak in _DATA_SHEETS.items() if words.issuperset(key)), None)


def _measured_flops(device: torch.device, precision: PrecisionName) -> float:
    """Measure the best speed of square products of `product_dtype`."""
    best, size, began = 0.0, _SMALLEST, time.perf_counter()
    generator, dtype = torch.Generator(device).manual_seed(0), product_dtype(device, precision)
    while not best or time.perf_counter() - began < _MEASURE_S:
        matrix = torch.randn(size, size, dtype=dtype, device=device, generator=generator)
        for _ in range(2):  # the first of a size is a warm-up
            seconds = _product_s(matrix)
            best = max(best, 2 * size**3 / seconds)
        if seconds < _PRODUCT_S and size < _LARGEST:
            size *= 2
    return best


def _product_s(matrix: torch.Tensor) -> float:
    _wait_for(matrix.device)
    began = time.perf_counter()
    matrix @ matrix
    _wait_for(matrix.device)
    return max(time.perf_counter() - began, 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
