"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) in the device's precision.

Shape legend: M the fewer of a matrix' rows and columns, N the more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from training.precision import product_dtype

_Group: TypeAlias = "dict[str, Any]"


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` whose products are of bf16 only where the device has that.

    Torch's multiplies bf16 everywhere, and a CPU that emulates it takes seconds for one layer. The
    step is torch's with Nesterov's momentum and `match_rms_adamw` (Liu et al. 2025, arXiv
    2502.16982, section 2.2), and so are settings and state: what one has saved, the other can
    load.

    Args:
        params: matrices, or groups of them with `lr` or `weight_decay` of their own.

    Raises:
        ValueError: a setting is out of its range, or a parameter is no matrix.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every matrix that has a gradient; returns what `closure` returns.

        Raises:
            ValueError: a loaded state has another momentum or scale than this optimizer.
            RuntimeError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._step_matrix(param, param.grad, group)
        return loss

    def _step_matrix(self, param: Tensor, grad: Tensor, group: _Group) -> None:
        if grad.is_sparse or grad.is_complex():
            raise RuntimeError("Muon takes no sparse or complex gradients; give it dense real ones")
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        update = orthogonal(
            grad.lerp(buffer, group["momentum"]),
            coefficients=group["ns_coefficients"],
            num_rounds=group["ns_steps"],
            eps=group["eps"],
        )
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(param.shape)))


def orthogonal(
    matrix: Tensor, *, coefficients: tuple[float, float, float], num_rounds: int, eps: float
) -> Tensor:
    """The matrix with singular values near 1, by rounds of Newton and Schulz.

    Scaled to Frobenius norm 1, it keeps its singular vectors, and each of the values s becomes
    a*s + b*s³ + c*s⁵ in each round. The result is of `product_dtype`, in which it is computed.

    Args:
        matrix: (M, N) or (N, M), not changed.
        coefficients: a, b, c.
        eps: the least norm that is divided by.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    start = matrix.to(product_dtype(matrix.device))
    x_MN = start.T if is_tall else start
    x_MN = x_MN / x_MN.norm().clamp(min=eps)
    for _ in range(num_rounds):
        gram_MM = x_MN @ x_MN.T
        factor_MM = torch.addmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c)
        x_MN = torch.addmm(x_MN, factor_MM, x_MN, beta=a)
    return x_MN.T if is_tall else x_MN


def _check(group: _Group) -> None:
    if not group["nesterov"] or group["adjust_lr_fn"] != "match_rms_adamw":
        raise ValueError(
            f"nesterov {group['nesterov']!r} and adjust_lr_fn {group['adjust_lr_fn']!r}: "
            "give True and 'match_rms_adamw', or take torch.optim.Muon"
        )
