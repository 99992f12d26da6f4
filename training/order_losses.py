"""The losses of sentence order on pairs in both orders.

Shape legend: C pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from training.data.batch import LossName
from training.data.examples import IGNORED
from training.data.order import OrderBatch
from training.losses import LossFunction, LossSums, mark_dynamic
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks


def _order_logits(model: AlbertForTasks, tokens: ModelInputs, firsts: Tensor) -> Tensor:
    """Return the logits (2 C, 2) of sentence order, from each sequence's [CLS] row."""
    return model.logits("sentence-order", model(tokens, firsts))


def order_loss(*, compiles: bool) -> LossFunction:
    """Return the loss function, compiled or not."""
    return (
        partial(paired_order_loss, logits=torch.compile(_order_logits))
        if compiles
        else paired_order_loss
    )


def paired_order_loss(
    model: AlbertForTasks, batch: OrderBatch, logits: Callable[..., Tensor] = _order_logits
) -> dict[LossName, LossSums]:
    """Return both losses of pairs in both orders.

    With s the log-odds of "in order", `paired-order` is -log sigmoid((s(A, B) - s(B, A)) / 2),
    which ignores what the pair's content adds to both, and `sentence-order` the cross-entropy of
    each order alone, which has this be 0, so that the service's probability of one text is
    calibrated. Halved, both have the same optimum: if the content allows the probability p,
    s(A, B) = -s(B, A) = log(p / (1 - p)). Each is log 2 at chance. Right in `paired-order` is a
    pair whose right order scores higher.

    Args:
        logits: `_order_logits`, optionally compiled.
    """
    if logits is not _order_logits:
        mark_dynamic([batch.firsts])
    logits_2C2 = logits(model, batch.tokens, batch.firsts).float()
    odds_2C = (logits_2C2[:, 0] - logits_2C2[:, 1]).view(2, -1)
    is_pair_C = batch.labels.view(2, -1)[0] != IGNORED
    signs_21 = torch.tensor([[1.0], [-1.0]], device=odds_2C.device)
    signed_2C = (signs_21 * odds_2C)[:, is_pair_C]
    margin_C = signed_2C.mean(0)
    return {
        "sentence-order": LossSums(
            loss=F.softplus(-signed_2C).sum(),
            right=(signed_2C > 0).sum(),
            count=batch.counts["sentence-order"],
        ),
        "paired-order": LossSums(
            loss=F.softplus(-margin_C).sum(),
            right=(margin_C > 0).sum(),
            count=batch.counts["paired-order"],
        ),
    }
