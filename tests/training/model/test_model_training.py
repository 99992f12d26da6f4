"""The model in training: saved tensors, dropout, and gradients of all parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from albert_serve.config import Activation, Sharing
from tests.training.support import (
    ROWS,
    TINY,
    assert_close,
    each_sharing,
    gradients,
    our_model,
    packed,
    weighed,
)

pytestmark = pytest.mark.process


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
        torch.manual_seed(0)
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
        if isinstance(module, nn.Dropout) and module.p == 0.25:
            module.register_forward_hook(
                lambda _, given, out: masks.append((out == 0) & (given[0] != 0))
            )
    batch, _ = packed([(16,)] * 64, 16)
    rows_RH = model(batch)[:, 0]
    assert len(masks) == 1 + 2 * 4
    model.logits("text-classification", rows_RH)
    assert len(masks) == 2 + 2 * 4
    assert all(abs(float(mask.float().mean()) - 0.25) < 0.03 for mask in masks)
    assert not any(torch.equal(*pair) for pair in combinations(masks[1:], 2))
    dropouts = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert dropouts.count(0.5) == 1
    assert torch.equal(
        model.logits("sentence-order", rows_RH), model.eval().logits("sentence-order", rows_RH)
    )


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
