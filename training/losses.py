"""What each task's loss and accuracy are.

Shape legend: B rows, S positions, H hidden size, R rows gathered, C sequences, K outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from training.batches import PretrainBatch
from training.examples import IGNORED
from training.heads import AlbertForTasks, Task
from training.model import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Summed loss and right answers over a number of predictions."""

    loss: Tensor
    right: Tensor
    count: int


class Tally:
    """Loss and accuracy over several batches; nothing is fetched from a GPU before it is asked."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: Tensor | None = None

    def add(self, score: Score) -> None:
        """Take one batch in."""
        self.count += score.count
        sums = torch.stack([score.loss.detach().double(), score.right.double()])
        self._sums = sums if self._sums is None else self._sums + sums

    def merge(self, other: Tally) -> None:
        """Take in what another one has."""
        self.count += other.count
        if other._sums is not None:
            self._sums = other._sums if self._sums is None else self._sums + other._sums

    @property
    def sums(self) -> tuple[float, float, float]:
        """Loss, right answers and predictions."""
        loss, right = (0.0, 0.0) if self._sums is None else self._sums.tolist()
        return loss, right, float(self.count)

    @property
    def loss(self) -> float:
        """Loss a prediction; nan where there was none."""
        return self.sums[0] / self.count if self.count else math.nan

    @property
    def accuracy(self) -> float:
        """The part of the predictions that is right; nan where there was none."""
        return self.sums[1] / self.count if self.count else math.nan


def score(logits_RK: Tensor, targets_R: Tensor, count: int | None = None) -> Score:
    """Cross-entropy and accuracy of logits (R, K); targets of IGNORED count for nothing.

    Args:
        count: how many others there are, where that is known.
    """
    return Score(
        loss=F.cross_entropy(logits_RK.float(), targets_R, ignore_index=IGNORED, reduction="sum"),
        right=(logits_RK.argmax(-1) == targets_R).sum(),
        count=int((targets_R != IGNORED).sum()) if count is None else count,
    )


class PretrainSums(NamedTuple):
    """Summed loss and right answers of masked tokens and, where there is its head, of order."""

    masked_loss: Tensor
    masked_right: Tensor
    order_loss: Tensor | None
    order_right: Tensor | None


def pretrain_sums(
    model: AlbertForTasks,
    tokens: Batch,
    rows_R: Tensor,
    targets_R: Tensor,
    firsts_C: Tensor,
    labels_C: Tensor,
) -> PretrainSums:
    """What `pretrain_scores` is made of, a function of tensors alone so that it can be compiled."""
    has_order = "sentence-order" in model.tasks
    read_R = torch.cat([rows_R, firsts_C]) if has_order else rows_R
    hidden_RH = model(tokens, read_R)
    masked = score(model.logits("fill-mask", hidden_RH[: len(rows_R)]), targets_R, 0)
    if not has_order:
        return PretrainSums(masked.loss, masked.right, None, None)
    order = score(model.logits("sentence-order", hidden_RH[len(rows_R) :]), labels_C, 0)
    return PretrainSums(masked.loss, masked.right, order.loss, order.right)


def pretrain_scores(
    model: AlbertForTasks,
    batch: PretrainBatch,
    sums: Callable[..., PretrainSums] = pretrain_sums,
) -> dict[Task, Score]:
    """Scores of masked tokens, and of the sentence task where the model has its head.

    Paper, sections 3.1 and 4.1. Nothing is computed for tokens that are not read: neither logits
    nor the last layer past its attention.

    Args:
        sums: `pretrain_sums`, which may be compiled.
    """
    given = (batch.rows, batch.targets, batch.firsts, batch.labels)
    found = sums(model, batch.tokens, *given)
    masked = Score(loss=found.masked_loss, right=found.masked_right, count=batch.num_masked)
    scores: dict[Task, Score] = {"fill-mask": masked}
    if found.order_loss is not None and found.order_right is not None:
        scores["sentence-order"] = Score(
            loss=found.order_loss, right=found.order_right, count=batch.num_pairs
        )
    return scores


def precision(device: torch.device) -> torch.autocast:
    """bf16 for the matrix products; weights, norms and losses stay in fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16)
