"""Optimizers and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from training.heads import AlbertForTasks, PooledHead


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Warm-up, constant, decay (WSD), as factors of the peak rate over progress from 0 to 1."""

    warmup: float = 0.03
    decay: float = 0.3

    def factor(self, progress: float) -> float:
        """The factor at `progress`, the part of the run that is done; 1 - sqrt in the decay."""
        if progress < self.warmup:
            return min(1.0, max(progress, 1e-4) / self.warmup)
        if progress <= 1 - self.decay:
            return 1.0
        return 1.0 - math.sqrt(min(1.0, (progress - 1 + self.decay) / self.decay))


@dataclass(frozen=True, slots=True)
class Optimizers:
    """Several optimizers that step as one, each at its own peak rate."""

    parts: Sequence[Optimizer]

    def step(self, factor: float) -> None:
        """Step at `factor` times the peak rates, then clear the gradients."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = group["peak_lr"] * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        """The state of every part."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: Sequence[dict[str, object]]) -> None:
        """Take back what `state_dict` gave."""
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)


def muon_with_adamw(
    model: AlbertForTasks,
    *,
    muon_lr: float,
    adamw_lr: float,
    pooled_lr: float,
    weight_decay: float = 0.01,
) -> Optimizers:
    """Muon for the matrices of the layers, AdamW for embeddings, heads, biases and norms.

    Args:
        muon_lr: peak rate of the layers' matrices.
        adamw_lr: peak rate of everything else,
        pooled_lr: but for the pooler and the heads that read the [CLS] row.
        weight_decay: decoupled, not of norms and biases.
    """
    matrices = [p for p in model.albert.encoder.parameters() if p.ndim == 2]
    muon = torch.optim.Muon(
        [{"params": matrices, "peak_lr": muon_lr}],
        lr=muon_lr,
        weight_decay=weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    pooled = list(_pooled_parameters(model))
    taken = {id(p) for p in matrices + pooled}
    rest = [p for p in model.parameters() if id(p) not in taken]
    parts: list[Optimizer] = [muon, adamw(rest, lr=adamw_lr, weight_decay=weight_decay)]
    if pooled:
        parts.append(adamw(pooled, lr=pooled_lr, weight_decay=weight_decay))
    return Optimizers(parts)


def _pooled_parameters(model: AlbertForTasks) -> Iterator[nn.Parameter]:
    if model.pooler is not None:
        yield from model.pooler.parameters()
    for head in model.heads.values():
        if isinstance(head, PooledHead):
            yield from head.output.parameters()


def adamw(params: Sequence[nn.Parameter], *, lr: float, weight_decay: float = 0.01) -> Optimizer:
    """AdamW with bias correction; norms and biases are not decayed."""
    matrices = [p for p in params if p.ndim == 2]
    vectors = [p for p in params if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "peak_lr": lr},
        {"params": vectors, "weight_decay": 0.0, "peak_lr": lr},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), eps=1e-6)
