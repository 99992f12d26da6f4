"""Our model computes what `transformers` does, on packed rows too; each shared weight is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from albert_serve.config import Activation, AlbertConfig, Sharing
from tests.training.support import (
    CONFIGS,
    ROWS,
    TINY,
    assert_close,
    assert_close_to_scale,
    copies,
    each_class,
    each_config,
    each_sharing,
    gradients,
    hf_logits,
    our_logits,
    our_model,
    packed,
    ragged,
    weighed,
)
from training.model.albert import Albert, Attention, ModelInputs
from training.model.heads import AlbertForTasks
from training.model.hf_names import parameters
from training.model.initialization import start_local


@each_class
@each_config
def test_logits_and_gradients_are_those_of_transformers(
    config: AlbertConfig, class_name: str
) -> None:
    """Also in training, where attention is made of plain products on a CPU."""
    ours, theirs = copies(config, class_name)
    with torch.no_grad():
        assert_close(our_logits(ours, ragged()), hf_logits(theirs, ragged()))
    for model, logits in ((ours, our_logits), (theirs, hf_logits)):
        model.train()
        loss = sum(x.square().sum() + x.sin().sum() for x in logits(model, ragged()).values())
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
    our_gradients = {name: p.grad for name, p in parameters(ours).items() if p.grad is not None}
    assert our_gradients.keys() == parameters(ours).keys()
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert_close_to_scale(our_gradients, their_gradients)


@pytest.mark.parametrize(
    ("sharing", "num_groups", "num_attentions", "num_ffns"),
    [
        ("all", 1, 1, 1),
        ("all", 2, 2, 2),
        ("attention", 2, 2, 4),
        ("ffn", 2, 4, 2),
        ("none", 2, 4, 4),
    ],
)
def test_what_is_shared_is_one_object(
    sharing: Sharing, num_groups: int, num_attentions: int, num_ffns: int
) -> None:
    model = Albert(replace(TINY, sharing=sharing, num_groups=num_groups)).eval()
    blocks = [model.encoder.attentions, model.encoder.ffns]
    calls: Counter[int] = Counter()
    for block in chain(*blocks):
        block.register_forward_hook(lambda module, *_: calls.update([id(module)]))
    model(ragged())
    for same, num_objects in zip(blocks, (num_attentions, num_ffns), strict=True):
        assert [calls[id(block)] for block in same] == [4 // num_objects] * num_objects


def test_fresh_weights_are_as_the_original_s() -> None:
    """Truncated at two deviations; zero biases; norms that change nothing."""
    torch.manual_seed(0)
    model = AlbertForTasks(replace(TINY, hidden_size=240), {"fill-mask": 50, "sentence-order": 2})
    for name, weight in model.named_parameters():
        parameter = weight.detach()
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, name.endswith("weight")))
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            assert 0.02 < parameter.abs().max() <= 0.04 + 1e-6, name
            assert abs(float(parameter.std()) - 0.0176) < 0.004, name


@torch.no_grad()
def test_each_head_of_the_local_start_looks_at_one_neighbour() -> None:
    """Head 0 one back, head 1 one ahead, head 2 two back, head 3 two ahead."""
    torch.manual_seed(0)
    config = replace(
        TINY, embedding_size=64, hidden_size=128, num_heads=4, num_groups=2, max_positions=32
    )
    model = AlbertForTasks(config, {"fill-mask": 50}).eval()
    start_local(model, np.arange(50) ** 2)
    batch = ragged((32, 32, 32))
    x_bsh = model.albert.embeddings(batch.ids, batch.types, None)
    for block in model.albert.encoder.attentions:
        assert isinstance(block, Attention)
        query, key = (
            part(x_bsh).unflatten(-1, (4, -1)).transpose(1, 2) for part in (block.query, block.key)
        )
        scores_bnss = query @ key.transpose(-1, -2) / 32**0.5
        weights_bnss, seen_bns = scores_bnss.softmax(-1).max(-1)
        offsets = seen_bns[:, :, 2:-2] - torch.arange(2, 30)
        for head, expected in enumerate((-1, 1, -2, 2)):
            assert (offsets[:, head] == expected).float().mean() > 0.9
            assert 0.7 < weights_bnss[:, head, 2:-2].mean() < 0.9


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


@pytest.mark.process
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
    config: AlbertConfig, read: Tensor, *, is_cut: bool = False
) -> dict[str, Tensor]:
    """The tokens that are read of the packed rows, and the gradients that they give."""
    batch, _ = packed(ROWS, 16)
    model = as_double(config).train()
    hidden = model(batch, read) if is_cut else model(batch).flatten(0, 1)[read]
    weighed(hidden).backward()  # type: ignore[no-untyped-call]
    return {**gradients(model), "hidden": hidden.detach()}


@pytest.mark.process
@each_architecture
def test_tokens_that_are_read_are_those_of_all(config: AlbertConfig) -> None:
    """In any order and more than once."""
    read = torch.tensor([70, 0, 17, 17, 31, 5, 0])
    cut = read_gradients(config, read, is_cut=True)
    assert_close_to_scale(read_gradients(config, read), cut)


@pytest.mark.process
@each_sharing
def test_recomputation_changes_nothing_but_memory(sharing: Sharing) -> None:
    """Dropout too falls on the same numbers again."""
    config = replace(TINY, sharing=sharing, num_groups=2, hidden_dropout=0.1, attention_dropout=0.1)
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


@pytest.mark.process
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
