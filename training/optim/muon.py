"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) in the device's precision.

Shape legend: M the smaller dimension of a matrix, N the larger.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from training.system.precision import PrecisionName, product_dtype

_Group: TypeAlias = "dict[str, Any]"


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` that uses bf16 products only on devices that support them.

    Torch's version always uses bf16, and a CPU that emulates it takes seconds for one layer. The
    step is torch's with Nesterov momentum and `match_rms_adamw` (Liu et al. 2025, arXiv 2502.16982,
    section 2.2).
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        weight_decay: float,
        precision: PrecisionName = "auto",
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.precision = precision

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every matrix that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_matrix(param, param.grad, group)

    def _step_matrix(self, param: Tensor, grad: Tensor, group: _Group) -> None:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        dtype = product_dtype(grad.device, self.precision)
        update = _orthogonal(
            grad.lerp(buffer, group["momentum"]),
            coefficients=group["ns_coefficients"],
            num_iterations=group["ns_steps"],
            eps=group["eps"],
            # In fp16, small gradients would become 0 before they are scaled.
            dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        )
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(param.shape)))


def _orthogonal(
    matrix: Tensor,
    *,
    coefficients: tuple[float, float, float],
    num_iterations: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Orthogonalise a matrix (singular values near 1) by Newton-Schulz iterations.

    The matrix is scaled to Frobenius norm 1; each iteration preserves the singular vectors and maps
    the singular values s to a*s + b*s³ + c*s⁵.

    Args:
        matrix: matrix (M, N) or (N, M), which is not changed.
        coefficients: factors a, b and c.
        eps: minimum norm to divide by.
        dtype: dtype of the products and of the result.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    start = matrix.to(dtype)
    x_MN = start.T if is_tall else start
    x_MN = x_MN / x_MN.norm().clamp(min=eps)
    for _ in range(num_iterations):
        gram_MM = x_MN @ x_MN.T
        factor_MM = torch.addmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c)
        x_MN = torch.addmm(x_MN, factor_MM, x_MN, beta=a)
    return x_MN.T if is_tall else x_MN
