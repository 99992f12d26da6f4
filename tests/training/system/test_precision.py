"""Products are of bf16 where the device is faster in it, and of fp32 elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from training.system import precision as precision_module
from training.system.precision import (
    cpu_has_bf16,
    cpu_is_faster_in_bf16,
    precision,
    product_dtype,
)

CPU = torch.device("cpu")
WITH_BF16: list[dict[str, Any]] = [
    {"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": True},
    {"architecture": "x86_64", "avx2": True, "amx_bf16": True, "avx512_bf16": False},
    {"architecture": "arm64", "neon": True, "bf16": True, "sve_max_length": 0},
]
WITHOUT_BF16: list[dict[str, Any]] = [
    {"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_vnni": True},
    {"architecture": "arm64", "neon": True, "bf16": False, "sve_bf16": False},
]
CASES = [(each, torch.bfloat16) for each in WITH_BF16]
CASES += [(each, torch.float32) for each in WITHOUT_BF16]


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    cpu_is_faster_in_bf16.cache_clear()
    yield
    cpu_is_faster_in_bf16.cache_clear()


@pytest.mark.parametrize(("capabilities", "dtype"), CASES)
def test_without_instructions_bf16_is_not_measured(
    capabilities: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[torch.dtype] = []
    seconds = {torch.bfloat16: 1.0, torch.float32: 2.0}

    def product_s(dtype: torch.dtype) -> float:
        measured.append(dtype)
        return seconds[dtype]

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(precision_module, "_product_s", product_s)
    assert cpu_has_bf16() == (dtype == torch.bfloat16)
    assert product_dtype(CPU) == dtype
    assert set(measured) == (set(seconds) if cpu_has_bf16() else set())
    matrix = torch.ones(2, 2)
    with precision(CPU):
        assert (matrix @ matrix).dtype == dtype
    assert (matrix @ matrix).dtype == torch.float32
    assert len(measured) <= 2, "measured once"


def test_a_cpu_slower_in_bf16_multiplies_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.bfloat16: 2.0, torch.float32: 1.0}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: WITH_BF16[0])
    monkeypatch.setattr(precision_module, "_product_s", seconds.__getitem__)
    assert product_dtype(CPU) == torch.float32


def test_a_gpu_multiplies_bf16_whatever_its_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: WITHOUT_BF16[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert product_dtype(torch.device("cuda")) == torch.bfloat16


def test_the_capabilities_are_this_cpus() -> None:
    """Under the names that torch has for it: one of them is known on each architecture."""
    names = torch.cpu.get_capabilities().keys()
    assert {"avx512_bf16", "amx_bf16"} <= names or "bf16" in names
    assert product_dtype(CPU) in (torch.bfloat16, torch.float32)
