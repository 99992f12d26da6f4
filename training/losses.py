"""Losses of micro-batches: their sums, and functions that the losses of several tasks share.

Shape legend: S positions, R gathered rows, C sequences, K outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.data.batch import ExampleBatch, LossName, MicroBatch
from training.data.examples import IGNORED
from training.model.heads import AlbertForTasks


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSums:
    """Summed loss and number of right answers of `count` predictions.

    Attributes:
        loss: () sum of the losses.
        right: () number of right predictions.
        count: number of predictions.
        logits: (C, K) logits of text classification, for its metrics.
        targets: (C,) or (C, K) targets of text classification, for its metrics.
    """

    loss: Tensor
    right: Tensor
    count: int
    logits: Tensor | None = None
    targets: Tensor | None = None


class Tally:
    """Loss and accuracy of several batches, summed on the device until they are read."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: Tensor | None = None
        self._logits: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, losses: LossSums) -> None:
        """Add the losses of one batch."""
        self.count += losses.count
        sums = torch.stack([losses.loss.detach().double(), losses.right.double()])
        self._sums = sums if self._sums is None else self._sums + sums
        if losses.logits is not None and losses.targets is not None:
            self._logits.append(losses.logits.detach())
            self._targets.append(losses.targets)

    def merge(self, other: Tally) -> None:
        """Add another tally."""
        self.count += other.count
        if other._sums is not None:
            self._sums = other._sums if self._sums is None else self._sums + other._sums
        self._logits += other._logits
        self._targets += other._targets

    def __getstate__(self) -> dict[str, Any]:
        """Return the state on the CPU, because another process has another device."""
        return {
            **vars(self),
            "_sums": None if self._sums is None else self._sums.cpu(),
            "_logits": [logits.cpu() for logits in self._logits],
            "_targets": [targets.cpu() for targets in self._targets],
        }

    @property
    def sums(self) -> tuple[float, float, float]:
        """Summed loss, number of right answers, and number of predictions."""
        loss, right = (0.0, 0.0) if self._sums is None else self._sums.tolist()
        return loss, right, float(self.count)

    @property
    def loss(self) -> float:
        """Mean loss per prediction, or nan without predictions."""
        return self.sums[0] / self.count if self.count else math.nan

    @property
    def accuracy(self) -> float:
        """Fraction of right predictions, or nan without predictions."""
        return self.sums[1] / self.count if self.count else math.nan

    @property
    def predictions(self) -> tuple[Tensor, Tensor]:
        """Logits (N, K) and targets (N,) or (N, K) of text classification."""
        return torch.cat(self._logits).float().cpu(), torch.cat(self._targets).cpu()


def cross_entropy(logits_RK: Tensor, targets_R: Tensor, count: int | None = None) -> LossSums:
    """Return the cross-entropy and accuracy of logits (R, K), except where a target is IGNORED.

    Args:
        count: number of targets that are not IGNORED, or None to count them.
    """
    return LossSums(
        loss=F.cross_entropy(logits_RK.float(), targets_R, ignore_index=IGNORED, reduction="sum"),
        right=(logits_RK.argmax(-1) == targets_R).sum(),
        count=int((targets_R != IGNORED).sum()) if count is None else count,
    )


def mark_dynamic(inputs: Iterable[Tensor | None], dimension: int = 0) -> None:
    """Have torch compile code for any size of a dimension, starting with the first batch.

    By default, torch compiles code for the first batch's size, and later code for any size. The two
    versions round sums differently, so results would depend on the step at which a run resumes.
    """
    for tensor in inputs:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def cls_logits(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
    """Return the logits (C, K) of the batch's classifier, from each example's [CLS] row."""
    return model.logits(batch.task, model(batch.tokens, batch.firsts))


def example_rows(batch: ExampleBatch) -> tuple[Tensor, Tensor]:
    """Return indices of each example's tokens in the flattened batch (C, S), and positions (S,).

    Indices beyond the batch's last token are replaced by the last token's index.
    """
    ids = batch.tokens.ids
    positions_S = torch.arange(ids.shape[1], device=ids.device)
    return (batch.firsts[:, None] + positions_S).clamp(max=ids.numel() - 1), positions_S


# A model's forward pass. It is an argument of the loss, so that it can be compiled separately.
LogitsFunction: TypeAlias = Callable[[AlbertForTasks, ExampleBatch], Tensor]
LossFunction: TypeAlias = Callable[[AlbertForTasks, Any], Mapping[LossName, LossSums]]


def compile_logits(logits: LogitsFunction) -> LogitsFunction:
    """Compile a model's forward pass for any number of rows and of packed examples.

    On a CPU, the compiled code also accepts rows of any length.
    """
    compiled = torch.compile(logits)

    def run(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
        packing = batch.tokens.packing
        assert packing is not None
        tokens = batch.tokens
        rows = (tokens.ids, tokens.types, packing.positions, packing.sequences)
        mark_dynamic((*rows, packing.bounds, batch.firsts, batch.sizes, batch.targets))
        if batch.firsts.device.type == "cpu":
            mark_dynamic(rows, dimension=1)
        # By default, torch assumes that sizes equal in the first batch are always equal.
        with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return compiled(model, batch)

    return run


class Objective(nn.Module):
    """A model and its loss functions as one module, which DDP wraps."""

    def __init__(
        self,
        model: AlbertForTasks,
        device: torch.device,
        loss_of: Mapping[str, LossFunction],
    ) -> None:
        super().__init__()
        self.model = model
        self.device = device
        self.loss_of = loss_of

    def forward(self, batch: MicroBatch) -> Mapping[LossName, LossSums]:
        """Return the losses of one micro-batch."""
        return self.loss_of[batch.task](self.model, batch.to(self.device))
