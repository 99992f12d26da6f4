"""Kernels and precision that a GPU has, by its compute capability."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch


class GpuSupport(NamedTuple):
    """The precision and the kernels that training uses on a GPU.

    Attributes:
        precision: of matrix products. fp16 needs a loss scale (`training/loop/step.py`).
        has_varlen: whether torch's variable-length attention runs there; else attention is over
            rows, with a mask.
    """

    precision: Literal["bf16", "fp16"]
    has_varlen: bool


def gpu_support(capability: tuple[int, int]) -> GpuSupport:
    """Return what a compute capability supports.

    Products in bf16 and FlashAttention came with 8.0 (A100); V100 (7.0) and T4 (7.5) have products
    in fp16.
    """
    has_both = capability >= (8, 0)
    return GpuSupport(precision="bf16" if has_both else "fp16", has_varlen=has_both)


def support_of(device: torch.device) -> GpuSupport | None:
    """Return what a device supports; None if it is not a GPU of CUDA or ROCm."""
    if device.type != "cuda":
        return None
    return gpu_support(torch.cuda.get_device_capability(device))
