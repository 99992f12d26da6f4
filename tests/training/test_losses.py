"""Losses count what is asked for, and no more than that is computed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.training.support import TINY, our_model
from training.examples import IGNORED, PretrainBatch
from training.heads import FillMaskHead
from training.losses import Score, Tally, pretrain_scores, score
from training.model import Batch


def test_a_score_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [5.0, 0.0, 0.0]])
    got = score(logits, torch.tensor([0, 2, IGNORED]))
    first = math.log(1 + 2 * math.exp(-2))
    second = math.log(2 + math.e)
    assert got.loss.item() == pytest.approx(first + second, abs=1e-6)
    assert got.right.item() == 1
    assert got.count == 2
    assert got.mean_loss.item() == pytest.approx((first + second) / 2, abs=1e-6)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_target_costs_nothing_and_has_a_gradient(num_rows: int) -> None:
    logits = torch.randn(num_rows, 4, requires_grad=True)
    got = score(logits, torch.full((num_rows,), IGNORED))
    assert (got.mean_loss.item(), got.right.item(), got.count) == (0, 0, 0)
    got.mean_loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert not logits.grad.any()


def test_logits_of_low_precision_are_summed_in_fp32() -> None:
    logits = torch.randn(4, 5).bfloat16()
    got = score(logits, torch.arange(4))
    assert got.loss.dtype == torch.float32
    assert torch.equal(got.loss, score(logits.float(), torch.arange(4)).loss)


def test_a_tally_is_that_of_all_predictions_together() -> None:
    tally = Tally()
    assert math.isnan(tally.loss)
    assert math.isnan(tally.accuracy)
    tally.add(Score(loss=torch.tensor(3.0), right=torch.tensor(1), count=1))
    tally.add(Score(loss=torch.tensor(1.0), right=torch.tensor(0), count=3))
    assert (tally.loss, tally.accuracy, tally.count) == (1.0, 0.25, 4)
    assert str(tally) == "1.000 25.0%"


def test_pretraining_computes_the_vocabulary_for_masked_rows_only() -> None:
    model = our_model(TINY, ("fill-mask", "sentence-order"))
    head = model.heads["fill-mask"]
    assert isinstance(head, FillMaskHead)
    shapes: list[tuple[int, ...]] = []
    head.decoder.register_forward_hook(lambda *given: shapes.append(tuple(given[2].shape)))
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(5, 50, (3, 16)))
    batch = PretrainBatch(
        tokens=Batch(ids=ids, types=torch.zeros_like(ids), lengths=torch.tensor([16, 9, 4])),
        rows=torch.tensor([3, 16 + 2, 16 + 8, 32 + 1]),
        targets=torch.tensor([7, 8, 9, 10]),
        orders=torch.tensor([1, IGNORED, 0]),
    )
    masked, order = pretrain_scores(model, batch)
    assert shapes == [(4, 50)]
    assert (masked.count, order.count) == (4, 2)
    with torch.no_grad():
        hidden = model(batch.tokens)
        rows = torch.stack([hidden[0, 3], hidden[1, 2], hidden[1, 8], hidden[2, 1]])
        expected = score(model.logits("fill-mask", rows), batch.targets)
        assert masked.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
        orders = score(model.logits("sentence-order", hidden[[0, 2], 0]), torch.tensor([1, 0]))
        assert order.loss.item() == pytest.approx(orders.loss.item(), rel=1e-5)
