"""Both orders of a pair are compared, and what its content adds to both is of no effect."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from training.data.examples import IGNORED
from training.data.order import OrderBatch
from training.model.albert import ModelInputs
from training.order_losses import paired_order_loss

# Log-odds of "in order" for each pair as it is, and swapped.
IN_ORDER, SWAPPED = [2.0, -1.0, 3.0, 0.5], [-2.0, -3.0, 3.5, 1.5]


def batch_of(num_pairs: int, rounded_to: int) -> OrderBatch:
    labels = torch.full((2, rounded_to), IGNORED)
    labels[:, :num_pairs] = torch.tensor([[0], [1]])
    empty = torch.zeros(1, 1, dtype=torch.long)
    return OrderBatch(
        tokens=ModelInputs(ids=empty, types=empty),
        firsts=torch.zeros(2 * rounded_to, dtype=torch.long),
        labels=labels.flatten(),
        num_tokens=1,
        counts={"sentence-order": 2 * num_pairs, "paired-order": num_pairs},
    )


def scores(logits: Tensor, num_pairs: int, rounded_to: int) -> dict[Any, Any]:
    batch = batch_of(num_pairs, rounded_to)
    return dict(paired_order_loss(cast("Any", None), batch, logits=lambda *_: logits))


def value(score: Any) -> float:
    return float(score.loss.detach())


def logits_of(in_order: list[float], swapped: list[float]) -> Tensor:
    odds = torch.tensor([*in_order, 9.0, *swapped, 9.0])  # one pair that only rounds up
    return torch.stack([odds + 1, torch.ones(len(odds))], dim=1).requires_grad_()


def test_losses_are_those_by_hand() -> None:
    result = scores(logits_of(IN_ORDER, SWAPPED), 4, 5)
    pairs = list(zip(IN_ORDER, SWAPPED, strict=True))
    paired = [math.log1p(math.exp(-(one - other) / 2)) for one, other in pairs]
    alone = [math.log1p(math.exp(-one)) + math.log1p(math.exp(other)) for one, other in pairs]
    assert value(result["paired-order"]) == pytest.approx(sum(paired), rel=1e-6)
    assert value(result["sentence-order"]) == pytest.approx(sum(alone), rel=1e-6)
    assert (int(result["paired-order"].right), result["paired-order"].count) == (2, 4)
    assert (int(result["sentence-order"].right), result["sentence-order"].count) == (5, 8)
