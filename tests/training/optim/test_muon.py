"""Muon makes torch's steps, in bf16 to its rounding and in fp32 by the book."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.support import pretend_bf16
from training.optim.muon import Muon

# Square, wide, tall, and of a single row and column.
SHAPES: Final = [(24, 24), (24, 40), (40, 24), (1, 7), (7, 1)]
BOTH: Final = pytest.mark.parametrize("has_bf16", [False, True], ids=["fp32", "bf16"])


def random(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_matrices() -> list[nn.Parameter]:
    return [nn.Parameter(random(shape, seed)) for seed, shape in enumerate(SHAPES)]


def torch_s(matrices: Sequence[nn.Parameter], **changes: Any) -> Optimizer:
    """The optimizer that ours follows."""
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
    return torch.optim.Muon(matrices, **{**options, **changes})


def ours(matrices: Sequence[nn.Parameter]) -> Muon:
    return Muon(matrices, lr=0.02, weight_decay=0.3)


def train(optimizer: Optimizer, steps: Sequence[int]) -> None:
    """The steps of these numbers; sizes of gradients and rates differ from step to step."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
            for number, parameter in enumerate(group["params"]):
                parameter.grad = random(parameter.shape, 100 * step + number) * 10.0 ** (step - 2)
        optimizer.step()


class ProductTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the types of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.add(result.dtype)
        return result


@BOTH
def test_products_are_of_the_device_s_precision(
    has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bf16(monkeypatch, has_bf16)
    matrices = make_matrices()
    with ProductTypes() as products:
        train(ours(matrices), range(1))
    assert products.dtypes == {torch.bfloat16 if has_bf16 else torch.float32}
    assert {matrix.dtype for matrix in matrices} == {torch.float32}


@pytest.mark.parametrize(
    ("has_bf16", "rounding"),
    [pytest.param(True, 2**-8, id="bf16"), pytest.param(False, 0.03, id="fp32")],
)
def test_steps_are_torch_s(
    has_bf16: bool, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a rounding of the way; in fp32 up to the several that torch's bf16 adds up."""
    pretend_bf16(monkeypatch, has_bf16)
    first, mine, theirs = make_matrices(), make_matrices(), make_matrices()
    train(ours(mine), range(5))
    train(torch_s(theirs), range(5))
    for start, one, other in zip(first, mine, theirs, strict=True):
        assert (one - other).norm() < rounding * (other - start).norm(), one.shape
