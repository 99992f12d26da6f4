"""The model in training: saved tensors, dropout, and gradients of all parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import get_args

import pytest
import torch
from torch import Tensor

from albert_serve.config import Activation, Sharing
from tests.training.support import (
    ROWS,
    TINY,
    assert_close,
    each_sharing,
    gradients,
    our_model,
    packed,
    ragged,
    weighed,
)
from training.model.albert import AttentionDropout
from training.model.dropout import Dropout, mixed


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@each_sharing
def test_recomputation_changes_nothing_but_memory(sharing: Sharing, dropout: float) -> None:
    """Dropout too falls on the same numbers again."""
    config = replace(
        TINY, sharing=sharing, num_groups=2, hidden_dropout=dropout, attention_dropout=dropout
    )
    found, saved = [], []
    for recomputes in (False, True):
        model = our_model(config, ("fill-mask",)).train()
        model.albert.encoder.recomputes = recomputes
        with counted_memory() as sizes:
            loss = weighed(model(packed(ROWS, 16)[0]).flatten(0, 1))
        loss.backward()  # type: ignore[no-untyped-call]
        found.append({**gradients(model), "loss": loss.detach()})
        saved.append(sum(sizes.values()))
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name
    assert saved[1] < saved[0] / 3


@contextmanager
def counted_memory() -> Iterator[dict[int, int]]:
    """The bytes of each tensor that is kept for the backward pass, weights included."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def test_dropout_is_where_the_original_has_it() -> None:
    """Behind the embeddings' norm, and before each residual: 1 + 2 L times, and on attention.

    Of the heads, classifiers have one, and sentence order none.
    """
    config = replace(TINY, hidden_dropout=0.25, attention_dropout=0.5, classifier_dropout=0.25)
    model = our_model(config, ("sentence-order", "text-classification")).train()
    masks: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(
                lambda _, given, out: masks.append((out == 0) & (given[0] != 0))
            )
    batch, _ = packed([(16,)] * 64, 16)
    assert batch.keys is not None
    rows_RH = model(batch)[:, 0]
    assert len(masks) == 1 + 2 * 4
    model.cls_logits("text-classification", rows_RH, batch.keys[:, 0])
    assert len(masks) == 2 + 2 * 4
    assert all(abs(float(mask.float().mean()) - 0.25) < 0.03 for mask in masks)
    assert not any(torch.equal(*pair) for pair in combinations(masks[1:], 2))
    assert [block.attention_dropout for block in model.albert.encoder.attentions] == [0.5]
    assert torch.equal(
        model.logits("sentence-order", rows_RH), model.eval().logits("sentence-order", rows_RH)
    )


def test_dropout_is_spread_evenly() -> None:
    """Over tokens, numbers, pairs of tokens and heads, as independent draws are."""
    keys_BS = mixed(torch.arange(1024)).view(2, 512)
    dropout = Dropout(0.1, site=1).train()
    hidden = dropout(torch.ones(2, 512, 256), keys_BS).flatten(0, 1)
    weights = AttentionDropout(0.1, keys_BS[:1])(torch.ones(1, 4, 512, 512))[0]
    for dropped in (hidden, *weights):
        is_zero = (dropped == 0).double()
        assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.9])
        assert abs(float(is_zero.mean()) - 0.1) < 0.003
        for mask in (is_zero, is_zero.T):
            noise = (0.1 * 0.9 / mask.shape[1]) ** 0.5
            assert float(mask.mean(1).std()) < 1.2 * noise
            correlations = torch.corrcoef(mask).fill_diagonal_(0)
            assert float(correlations.std()) < 1.1 * mask.shape[1] ** -0.5
            assert float(correlations.abs().max()) < 7 * mask.shape[1] ** -0.5
    heads = torch.corrcoef((weights == 0).double().flatten(1)).fill_diagonal_(0)
    assert float(heads.abs().max()) < 0.02


def test_dropout_without_keys_is_refused() -> None:
    model = our_model(replace(TINY, hidden_dropout=0.1), ()).train()
    with pytest.raises(ValueError, match="dropout needs the keys of the batch"):
        model(ragged())


@pytest.mark.parametrize("activation", get_args(Activation))
def test_what_is_written_otherwise_for_a_compiler_is_the_same(activation: Activation) -> None:
    """Maps, and the activation; to the rounding of double precision, gradients too."""
    found = []
    for is_compiled in (False, True):
        model = our_model(replace(TINY, activation=activation), ("fill-mask",)).double().train()
        forward = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
        hidden = forward(packed(ROWS, 16)[0])
        weighed(hidden.flatten(0, 1)).backward()  # type: ignore[no-untyped-call]
        found.append({**gradients(model), "hidden": hidden.detach()})
    scale = max(float(tensor.abs().max()) for tensor in found[0].values())
    assert_close(found[0], found[1], limit=1e-11 * max(scale, 1))
    torch._dynamo.reset()
