"""What each task's loss and accuracy are.

Shape legend: B rows, S positions, H hidden size, R rows gathered, C sequences, K outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from training.data.collate import PretrainBatch
from training.data.examples import IGNORED
from training.model.albert import Batch
from training.model.heads import AlbertForTasks, Task

# A task's own loss has the task's name; the others are what a teacher adds (training.distil).
LossName = Literal[Task, "hidden-states", "attention-relations"]


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
    return head_sums(model, model(tokens, read_rows(model, rows_R, firsts_C)), targets_R, labels_C)


def read_rows(model: AlbertForTasks, rows_R: Tensor, firsts_C: Tensor) -> Tensor:
    """The tokens whose hidden states the model's heads read: masked ones, then each [CLS]."""
    return torch.cat([rows_R, firsts_C]) if "sentence-order" in model.tasks else rows_R


def head_sums(
    model: AlbertForTasks, hidden_RH: Tensor, targets_R: Tensor, labels_C: Tensor
) -> PretrainSums:
    """The sums of the heads over the hidden states of `read_rows`."""
    num_masked = len(targets_R)
    masked = score(model.logits("fill-mask", hidden_RH[:num_masked]), targets_R, 0)
    if "sentence-order" not in model.tasks:
        return PretrainSums(masked.loss, masked.right, None, None)
    order = score(model.logits("sentence-order", hidden_RH[num_masked:]), labels_C, 0)
    return PretrainSums(masked.loss, masked.right, order.loss, order.right)


def pretrain_scores(
    model: AlbertForTasks,
    batch: PretrainBatch,
    sums: Callable[..., PretrainSums] = pretrain_sums,
) -> dict[LossName, Score]:
    """Scores of masked tokens, and of the sentence task where the model has its head.

    Paper, sections 3.1 and 4.1. Nothing is computed for tokens that are not read: neither logits
    nor the last layer past its attention.

    Args:
        sums: `pretrain_sums`, which may be compiled.
    """
    given = (batch.rows, batch.targets, batch.firsts, batch.labels)
    return scores_of(batch, sums(model, batch.tokens, *given))


def scores_of(batch: PretrainBatch, sums: PretrainSums) -> dict[LossName, Score]:
    """The scores of a batch from its sums."""
    masked = Score(loss=sums.masked_loss, right=sums.masked_right, count=batch.num_masked)
    scores: dict[LossName, Score] = {"fill-mask": masked}
    if sums.order_loss is not None and sums.order_right is not None:
        scores["sentence-order"] = Score(
            loss=sums.order_loss, right=sums.order_right, count=batch.num_pairs
        )
    return scores
