"""Precision of matrix products: bf16 where the device supports it, else fp32."""

from __future__ import annotations

from typing import Final

import torch

# As `torch.cpu.get_capabilities` names them: those of x86-64, then that of Arm.
_BF16_INSTRUCTIONS: Final = ("avx512_bf16", "amx_bf16", "bf16")


def precision(device: torch.device) -> torch.autocast:
    """Return the autocast context of training: products in `product_dtype`, all else in fp32."""
    enabled = product_dtype(device) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 if the device supports it, else fp32.

    A CPU without instructions for bf16 emulates it, up to two hundred times slower than fp32.
    """
    return torch.bfloat16 if device.type != "cpu" or cpu_has_bf16() else torch.float32


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in _BF16_INSTRUCTIONS)
