"""What each task's loss and accuracy are.

Shape legend: B sequences, S positions, H hidden size, R rows gathered, K outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from training.examples import IGNORED, PretrainBatch
from training.heads import AlbertForTasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Summed loss and right answers over a number of predictions."""

    loss: Tensor
    right: Tensor
    count: int

    @property
    def mean_loss(self) -> Tensor:
        """Loss a prediction; 0 where there is none."""
        return self.loss / max(self.count, 1)


class Tally:
    """Loss and accuracy over several batches."""

    def __init__(self) -> None:
        self.count = 0
        self._loss = self._right = 0.0

    def add(self, score: Score) -> None:
        """Take one batch in."""
        self.count += score.count
        self._loss += score.loss.item()
        self._right += score.right.item()

    @property
    def loss(self) -> float:
        """Loss a prediction; nan where there was none."""
        return self._loss / self.count if self.count else math.nan

    @property
    def accuracy(self) -> float:
        """The part of the predictions that is right; nan where there was none."""
        return self._right / self.count if self.count else math.nan

    def __str__(self) -> str:
        return f"{self.loss:.3f} {self.accuracy:.1%}"


def score(logits_RK: Tensor, targets_R: Tensor) -> Score:
    """Cross-entropy and accuracy of logits (R, K); targets of IGNORED count for nothing."""
    kept = targets_R != IGNORED
    return Score(
        loss=F.cross_entropy(logits_RK.float(), targets_R, ignore_index=IGNORED, reduction="sum"),
        right=((logits_RK.argmax(-1) == targets_R) & kept).sum(),
        count=int(kept.sum()),
    )


def pretrain_scores(model: AlbertForTasks, batch: PretrainBatch) -> tuple[Score, Score]:
    """Masked-token and sentence-order scores of one batch (paper, sections 3.1 and 4.1)."""
    hidden_BSH = model(batch.tokens)
    rows_RH = hidden_BSH.flatten(0, 1)[batch.rows]
    masked = score(model.logits("fill-mask", rows_RH), batch.targets)
    order = score(model.logits("sentence-order", hidden_BSH[:, 0]), batch.orders)
    return masked, order


def precision(device: torch.device) -> torch.autocast:
    """bf16 for the matrix products; weights, norms and losses stay in fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16)
