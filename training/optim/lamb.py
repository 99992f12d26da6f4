"""LAMB (You et al. 2019, arXiv 1904.00962) as in ALBERT's published code.

That code (`lamb_optimizer.py` of google-research/ALBERT) differs from the paper: it has no bias
correction, epsilon is outside the root, and the trust ratio is not clamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

_Group: TypeAlias = "dict[str, Any]"


class Lamb(Optimizer):
    """LAMB, which scales Adam's step u of each matrix w to the length of w: w - lr * |w| / |u| * u.

    Weight decay is part of u. Parameters with fewer than two dimensions change by lr * u, without
    decay or trust ratio. In ALBERT these are the biases and the weights of norms, which the
    original excludes by name. The ratio is 1 if either norm is 0. Each tensor has one ratio, so
    queries, keys and values must be separate tensors.

    A step does not synchronise with the device.

    Args:
        params: parameters, or groups of them with their own `lr`, `betas`, `eps` or
            `weight_decay`.
        eps: number that is added to the root of the second moment.
    """

    # Trust ratios of the last step, one tensor per group with matrices.
    _ratios: Sequence[Tensor] = ()

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        ratios: list[Tensor] = []
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            vectors = [p for p in stepped if p.ndim < 2]
            matrices = [p for p in stepped if p.ndim >= 2]
            if vectors:
                torch._foreach_add_(vectors, self._updates(vectors, group), alpha=-group["lr"])
            if matrices:
                ratios.append(self._step_matrices(matrices, group))
        self._ratios = ratios

    def trust_ratios(self) -> Tensor | None:
        """Return each matrix's trust ratio in the last step, (matrices,), or None before a step."""
        return torch.cat(list(self._ratios)) if self._ratios else None

    def _step_matrices(self, matrices: list[Tensor], group: _Group) -> Tensor:
        updates = self._updates(matrices, group)
        if group["weight_decay"]:
            torch._foreach_add_(updates, matrices, alpha=group["weight_decay"])
        weight_norms = torch.stack(torch._foreach_norm(matrices))
        update_norms = torch.stack(torch._foreach_norm(updates))
        has_both = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(has_both, weight_norms / update_norms, 1.0)
        torch._foreach_addcmul_(matrices, updates, ratios.unbind(), value=-group["lr"])
        return ratios

    def _updates(self, params: list[Tensor], group: _Group) -> list[Tensor]:
        """Update the moments; return the first moment divided by the root of the second."""
        beta1, beta2 = group["betas"]
        grads = [p.grad for p in params if p.grad is not None]
        means = [self._moment(p, "exp_avg") for p in params]
        squares = [self._moment(p, "exp_avg_sq") for p in params]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        return list(torch._foreach_div(means, roots))

    def _moment(self, param: Tensor, name: str) -> Tensor:
        state = self.state[param]
        if name not in state:
            state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        moment: Tensor = state[name]
        return moment
