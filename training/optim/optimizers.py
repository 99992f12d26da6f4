"""Optimizers, learning-rate schedules, and the hyperparameters of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from training.errors import TrainingError
from training.model.heads import AlbertForTasks, PooledHead
from training.optim.lamb import Lamb
from training.optim.muon import Muon
from training.system.precision import PrecisionName

OptimizerName = Literal["lamb", "adamw", "muon"]
ScheduleName = Literal["linear", "wsd"]
# Minimum progress in the warm-up of `wsd`, which gives the first step a rate above 0.
_FIRST_PROGRESS: Final = 1e-4


class OptimizerError(TrainingError):
    """An invalid schedule, or a saved state of other optimizers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Learning-rate schedule: the multiplier on the peak rate over the progress of a run.

    Progress is a fraction of the steps or of the wall clock, as the caller counts it.

    Attributes:
        kind: form of the schedule. `linear` is the original's (`optimization.py` of
            google-research/ALBERT): the rate decays from the peak at progress 0 to 0 at 1. The
            warm-up replaces the first part of this decay, so the first step has rate 0, and the
            rate reaches only 0.975 of the peak with the paper's 3,125 of 125,000 steps. `wsd`
            warms up, stays constant, and decays by 1 - sqrt.
        warmup: fraction of the run for the warm-up.
        decay: fraction of the run for the decay, which `linear` ignores.
    """

    kind: ScheduleName = "wsd"
    warmup: float = 0.03
    decay: float = 0.3

    def __post_init__(self) -> None:
        if self.kind == "wsd" and self.warmup + self.decay > 1 + 1e-9:
            raise OptimizerError(
                f"Warm-up {self.warmup} and decay {self.decay} exceed the run. "
                "Choose fractions whose sum is at most 1."
            )

    def factor(self, progress: float) -> float:
        """Return the multiplier, 0 to 1, for a step that starts at `progress`, 0 to 1."""
        if self.kind == "linear":
            if progress < self.warmup:
                return progress / self.warmup
            return max(0.0, 1.0 - progress)
        if progress < self.warmup:
            return min(1.0, max(progress, _FIRST_PROGRESS) / self.warmup)
        if progress <= 1 - self.decay:
            return 1.0
        return 1.0 - math.sqrt(min(1.0, (progress - 1 + self.decay) / self.decay))


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of the optimizer.

    Attributes:
        optimizer: name of the optimizer. `lamb` is the paper's. `muon` updates the layers'
            matrices, and AdamW the other parameters.
        lr: peak learning rate. With `muon`, it applies only to the layers' matrices.
        adamw_lr: peak learning rate of the other parameters with `muon`. Ignored without `muon`.
        pooled_factor: learning-rate multiplier of the pooler and of the heads that read the [CLS]
            row. It is 1 in the paper.
        weight_decay: decoupled weight decay of matrices. Biases and the weights of norms are not
            decayed.
    """

    optimizer: OptimizerName = "muon"
    lr: float = 1e-3
    adamw_lr: float = 3e-3
    pooled_factor: float = 0.1
    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(OptimizerSettings):
    """Hyperparameters of a run: optimizers, learning-rate schedule, loss weights and seed.

    Attributes:
        sentence_weight: weight of the sentence-order loss.
    """

    schedule: ScheduleName
    warmup: float
    decay: float
    sentence_weight: float
    clip_norm: float
    seed: int = 0

    @property
    def rate_schedule(self) -> Schedule:
        """The learning-rate schedule."""
        return Schedule(kind=self.schedule, warmup=self.warmup, decay=self.decay)

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weights of the sentence-order losses, by the losses' names."""
        return {"sentence-order": self.sentence_weight, "paired-order": self.sentence_weight}


@dataclass(frozen=True, slots=True)
class Optimizers:
    """Optimizers that step together, each parameter group at its own peak learning rate."""

    parts: Sequence[Optimizer]

    def step(self, factor: float) -> None:
        """Step at `factor` times the peak learning rates, then clear the gradients."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = group["peak_lr"] * factor
            part.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clear the gradients without a step."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last step. With LAMB, this is the mean trust ratio of the matrices.

        This method synchronises with the device, but not with other ranks.
        """
        for part in self.parts:
            ratios = part.trust_ratios() if isinstance(part, Lamb) else None
            if ratios is not None:
                return {"trust_ratio": ratios.mean().item()}
        return {}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of every part."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Load the result of `state_dict`, including the peak learning rates."""
        if len(state) != len(self.parts):
            raise OptimizerError(
                f"The run has {len(state)} optimizers, not {len(self.parts)}. "
                "Resume it with the same optimizer."
            )
        for part, part_state in zip(self.parts, state, strict=True):
            try:
                part.load_state_dict(part_state)
            except (KeyError, TypeError, ValueError) as error:
                raise OptimizerError(
                    f"The state of the run does not fit {type(part).__name__}: {error}. "
                    "Resume it with the same optimizer and model."
                ) from error


def build_optimizers(
    model: AlbertForTasks, settings: OptimizerSettings, precision: PrecisionName = "auto"
) -> Optimizers:
    """Build the optimizers of all parameters of a model."""
    matrices: list[nn.Parameter] = []
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimizer == "muon":
        matrices = [p for p in model.albert.encoder.parameters() if p.ndim == 2]
        lr = settings.adamw_lr
    pooled, unpooled = _split_pooled(model, matrices)
    rates = [(unpooled, lr), (pooled, lr * settings.pooled_factor)]
    rates = [(params, rate) for params, rate in rates if params]
    if settings.optimizer == "lamb":
        groups = [{"params": params, "peak_lr": rate} for params, rate in rates]
        return Optimizers([Lamb(groups, lr=lr, weight_decay=decay)])
    adamws = [_adamw(params, lr=rate, weight_decay=decay) for params, rate in rates]
    if not matrices:
        return Optimizers(adamws)
    groups = [{"params": matrices, "peak_lr": settings.lr}]
    return Optimizers(
        [Muon(groups, lr=settings.lr, weight_decay=decay, precision=precision), *adamws]
    )


def _split_pooled(
    model: AlbertForTasks, excluded: Sequence[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that only the [CLS] row trains, and all others except `excluded`."""
    pooled = list(_pooled_parameters(model))
    omitted = {id(p) for p in (*pooled, *excluded)}
    return pooled, [p for p in model.parameters() if id(p) not in omitted]


def _pooled_parameters(model: AlbertForTasks) -> Iterator[nn.Parameter]:
    if model.pooler is not None:
        yield from model.pooler.parameters()
    for head in model.heads.values():
        if isinstance(head, PooledHead):
            yield from head.output.parameters()


def _adamw(params: Sequence[nn.Parameter], *, lr: float, weight_decay: float) -> Optimizer:
    """Build AdamW with bias correction, and without decay of norms and biases."""
    # A fused step reads memory once. On a CPU, it takes a third to an eighth of the time, and its
    # result is identical to the bit with any number of threads.
    matrices = [p for p in params if p.ndim == 2]
    vectors = [p for p in params if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "peak_lr": lr},
        {"params": vectors, "weight_decay": 0.0, "peak_lr": lr},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), eps=1e-6, fused=True)
