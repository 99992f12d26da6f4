"""Precision of matrix products: fp32, bf16, fp16, or the fastest on the device."""

from __future__ import annotations

import time
from functools import cache
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import torch

PrecisionName: TypeAlias = Literal["auto", "fp32", "bf16", "fp16"]

# torch types by name.
DTYPES: Final = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)

# Names in `torch.cpu.get_capabilities`: two for x86-64, and one for Arm.
_BF16_INSTRUCTIONS: Final = ("avx512_bf16", "amx_bf16", "bf16")
_ROWS: Final = 1024
_WIDTH: Final = 512
_REPEATS: Final = 10


def precision(device: torch.device, name: PrecisionName = "auto") -> torch.autocast:
    """Return the autocast context of training.

    Matrix products are computed in `product_dtype`, everything else in fp32.
    """
    dtype = product_dtype(device, name)
    if dtype == torch.float32:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=dtype)


def product_dtype(device: torch.device, name: PrecisionName = "auto") -> torch.dtype:
    """Return the torch type of a precision, or the device's fastest type for `auto`."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        is_new = is_ampere(torch.cuda.get_device_capability(device))
        return torch.bfloat16 if is_new else torch.float16
    return torch.bfloat16 if device.type != "cpu" or cpu_is_faster_in_bf16() else torch.float32


def cpu_has_bf16() -> bool:
    """Return whether this CPU has instructions for bf16 products.

    Other CPUs emulate bf16, up to two hundred times slower than fp32.
    """
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in _BF16_INSTRUCTIONS)


@cache
def cpu_is_faster_in_bf16() -> bool:
    """Return whether this CPU multiplies matrices faster in bf16 than in fp32, measured once.

    The instructions alone do not decide this: in bf16, AMX is several times as fast as fp32, but
    AVX-512 is half as fast as fp32 on some Intel processors. The CPU time of one thread is
    measured, because other programs hardly change it. Repeated commands therefore use the same
    precision.
    """
    if not cpu_has_bf16():
        return False
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _product_s(torch.bfloat16) < _product_s(torch.float32)
    finally:
        torch.set_num_threads(num_threads)


def _product_s(dtype: torch.dtype) -> float:
    """Return the shortest of ten durations of a matrix product of a layer's size, in seconds."""
    rows = torch.ones(_ROWS, _WIDTH, dtype=dtype)
    weights = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    durations = []
    for _ in range(_REPEATS):
        start = time.thread_time()
        torch.nn.functional.linear(rows, weights)
        durations.append(time.thread_time() - start)
    return min(durations)


def is_ampere(capability: tuple[int, int]) -> bool:
    """Return whether a GPU of this compute capability has bf16 products and FlashAttention.

    GPUs have both from 8.0 (A100) on. V100 (7.0) and T4 (7.5) have fp16 products, which need a loss
    scale (`training/loop/step.py`).
    """
    return capability >= (8, 0)


def has_varlen(device: torch.device) -> bool:
    """Return whether torch's variable-length attention runs on a device.

    Other devices use attention with a mask.
    """
    return device.type == "cuda" and is_ampere(torch.cuda.get_device_capability(device))
