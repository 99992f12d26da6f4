"""The model in training: packed rows, recomputation, dropout and compilation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import get_args

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from albert_serve.config import Activation, AlbertConfig, Sharing
from tests.training.support import (
    CONFIGS,
    ROWS,
    TINY,
    assert_close_to_scale,
    each_sharing,
    gradients,
    our_model,
    packed,
    weighed,
)
from training.model.albert import Albert, CumulativeLengths, ModelInputs
from training.model.heads import AlbertForTasks

pytestmark = pytest.mark.process


def as_double(config: AlbertConfig) -> AlbertForTasks:
    return our_model(config, ("fill-mask",)).double()


each_architecture = pytest.mark.parametrize(
    "config",
    [
        *CONFIGS.values(),
        *(
            replace(CONFIGS["groups and inner"], sharing=sharing)
            for sharing in get_args(Sharing)[1:]
        ),
    ],
    ids=lambda config: f"{config.sharing}-{config.num_groups}-{config.num_inner_layers}",
)


@each_architecture
def test_packed_gradients_are_those_of_each_sequence_alone(config: AlbertConfig) -> None:
    """And those of the same sequences, padded; in training, without dropout."""
    batch, alone = packed(ROWS, 16)
    lengths = torch.tensor([one.ids.shape[1] for _, one in alone])
    padded = ModelInputs(
        ids=pad_sequence([one.ids[0] for _, one in alone], batch_first=True),
        types=pad_sequence([one.types[0] for _, one in alone], batch_first=True),
        lengths=lengths,
    )
    places: list[tuple[ModelInputs, list[slice]]] = [
        (batch, [place for place, _ in alone]),
        (padded, [slice(16 * n, 16 * n + int(size)) for n, size in enumerate(lengths)]),
    ]
    results = []
    for together, rows in places:
        model = as_double(config).train()
        hidden = model(together).flatten(0, 1)
        sum(weighed(hidden[row]) for row in rows).backward()  # type: ignore[union-attr]
        results.append(gradients(model))
    model = as_double(config).train()
    for _, one in alone:
        weighed(model(one)[0]).backward()  # type: ignore[no-untyped-call]
    for result in results:
        assert_close_to_scale(result, gradients(model))


def read_gradients(
    config: AlbertConfig, read: Tensor, *, is_cut: bool = False, recomputes: bool = False
) -> dict[str, Tensor]:
    """The tokens that are read of the packed rows, and the gradients that they give."""
    batch, _ = packed(ROWS, 16)
    model = as_double(config).train()
    model.albert.encoder.recomputes = recomputes
    hidden = model(batch, read) if is_cut else model(batch).flatten(0, 1)[read]
    weighed(hidden).backward()  # type: ignore[no-untyped-call]
    return {**gradients(model), "hidden": hidden.detach()}


@each_architecture
@pytest.mark.parametrize("recomputes", [False, True])
def test_tokens_that_are_read_are_those_of_all(config: AlbertConfig, recomputes: bool) -> None:
    """In any order and more than once."""
    read = torch.tensor([70, 0, 17, 17, 31, 5, 0])
    cut = read_gradients(config, read, is_cut=True, recomputes=recomputes)
    assert_close_to_scale(read_gradients(config, read), cut)


def attend_within(
    query_tnd: Tensor,
    key_tnd: Tensor,
    value_tnd: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    query_longest: int,
    key_longest: int,
) -> Tensor:
    """The definition of `varlen_attn`: attention within each span of the bounds."""
    assert torch.equal(query_bounds, key_bounds)
    assert query_bounds.dtype == torch.int32
    bounds: list[int] = query_bounds.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(query_tnd))
    parts = []
    for begin, end in pairwise(bounds):
        assert 0 <= end - begin <= min(query_longest, key_longest)
        query, key, value = (x[begin:end].transpose(0, 1) for x in (query_tnd, key_tnd, value_tnd))
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        parts.append((scores.softmax(-1) @ value).transpose(0, 1))
    return torch.cat(parts)


@each_architecture
def test_attention_within_bounds_is_that_of_the_mask(
    config: AlbertConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself runs on a GPU alone; here its definition stands in its place."""
    batch, alone = packed(ROWS, 16)
    real = torch.cat([torch.arange(place.start, place.stop) for place, _ in alone])
    masked = read_gradients(config, real)
    assert batch.packing is not None
    bounds = CumulativeLengths(bounds=batch.packing.bounds, longest=16)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", attend_within)
    monkeypatch.setattr(Albert, "_attention_mask", lambda *_: bounds)
    assert_close_to_scale(masked, read_gradients(config, real))


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_gpu_attends_within_bounds_where_its_kernel_can(
    monkeypatch: pytest.MonkeyPatch, dropout: float, is_training: bool
) -> None:
    """The kernel has no dropout, and no products of fp32."""
    model = Albert(replace(TINY, attention_dropout=dropout)).train(is_training)
    batch, _ = packed(ROWS, 16)
    assert batch.packing is not None
    for has_varlen, autocast in product((False, True), ("cuda", "cpu")):
        monkeypatch.setattr(torch, "is_autocast_enabled", autocast.__eq__)
        model.has_varlen = has_varlen
        mask = model._attention_mask(batch)
        if has_varlen and autocast == "cuda" and not (is_training and dropout):
            assert isinstance(mask, CumulativeLengths)
            assert mask.bounds is batch.packing.bounds
            assert mask.longest == 16
        else:
            assert isinstance(mask, Tensor)


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
    assert_close_to_scale(found[0], found[1], limit=1e-11)
    torch._dynamo.reset()
