"""Our model computes what `transformers` does, and holds each shared weight once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from albert_serve.config import AlbertConfig, Sharing, preset
from albert_serve.errors import ConfigError
from tests.training.support import (
    TINY,
    TOGETHER,
    assert_close,
    assert_close_to_scale,
    copies,
    each_class,
    each_config,
    hf_logits,
    our_logits,
    our_model,
    ragged,
)
from training.model.albert import Albert, Attention, ModelInputs, attend
from training.model.heads import AlbertForTasks, head_sizes
from training.model.hf_names import parameters
from training.model.initialization import start_local


@each_class
@each_config
@torch.no_grad()
def test_logits_are_those_of_transformers(config: AlbertConfig, class_name: str) -> None:
    ours, theirs = copies(config, class_name)
    assert_close(our_logits(ours, ragged()), hf_logits(theirs, ragged()))


@each_class
@each_config
def test_gradients_are_those_of_transformers(config: AlbertConfig, class_name: str) -> None:
    """In training, where attention is made of plain products on a CPU."""
    gradients = []
    ours, theirs = copies(config, class_name)
    for model, logits in ((ours, our_logits), (theirs, hf_logits)):
        model.train()
        loss = sum(x.square().sum() + x.sin().sum() for x in logits(model, ragged()).values())
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append(loss)
    assert abs(gradients[0] - gradients[1]) < 1e-9
    our_gradients = {name: p.grad for name, p in parameters(ours).items() if p.grad is not None}
    assert our_gradients.keys() == parameters(ours).keys()
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert_close_to_scale(our_gradients, their_gradients)


@pytest.mark.parametrize("is_masked", [False, True])
def test_both_ways_of_attention_agree(is_masked: bool) -> None:
    """The plain products and the fused kernel, which other devices train with."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)[:, None, None]
    torch.manual_seed(0)
    first = [torch.randn(2, 4, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    second = [tensor.detach().clone().requires_grad_() for tensor in first]
    given_mask = mask if is_masked else None
    plain = attend(first[0], first[1], first[2], given_mask, nn.Dropout(0.0))
    query, key, value = (part.transpose(1, 2) for part in second)
    fused = F.scaled_dot_product_attention(query, key, value, given_mask).transpose(1, 2)
    assert (plain - fused).abs().max() < 1e-12
    for out in (plain, fused):
        out.square().sum().backward()  # type: ignore[no-untyped-call]
    for one, other in zip(first, second, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).abs().max() < 1e-12


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("sharing", "owns_attention", "owns_ffn"),
    [
        ("all", False, False),
        ("attention", False, True),
        ("ffn", True, False),
        ("none", True, True),
    ],
)
def test_what_is_shared_is_one_object(
    sharing: Sharing, owns_attention: bool, owns_ffn: bool, num_groups: int
) -> None:
    config = replace(TINY, sharing=sharing, num_groups=num_groups)
    model = Albert(config).eval()
    encoder = model.encoder
    num_attentions = 4 if owns_attention else num_groups
    num_ffns = 4 if owns_ffn else num_groups
    assert len(encoder.attentions) == num_attentions
    assert len(encoder.ffns) == num_ffns
    calls: Counter[int] = Counter()
    for block in [*encoder.attentions, *encoder.ffns]:
        block.register_forward_hook(lambda module, *_: calls.update([id(module)]))
    model(ragged())
    assert [calls[id(block)] for block in encoder.attentions] == [4 // num_attentions] * len(
        encoder.attentions
    )
    assert [calls[id(block)] for block in encoder.ffns] == [4 // num_ffns] * len(encoder.ffns)


@pytest.fixture(scope="module")
def double_model() -> AlbertForTasks:
    return our_model(TINY, TOGETHER).double()


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    num_padded=st.integers(0, 15),
    filler=st.integers(0, 49),
)
@torch.no_grad()
def test_padding_changes_no_real_position(
    double_model: AlbertForTasks, lengths: list[int], num_padded: int, filler: int
) -> None:
    batch = ragged(tuple(lengths))
    width = min(16, max(lengths) + num_padded)
    ids = torch.full((len(lengths), width), filler)
    types = torch.ones_like(ids)
    for line, length in enumerate(lengths):
        ids[line, :length] = batch.ids[line, :length]
        types[line, :length] = batch.types[line, :length]
    padded = double_model(ModelInputs(ids=ids, types=types, lengths=batch.lengths))
    for line, length in enumerate(lengths):
        alone = ModelInputs(
            ids=ids[line : line + 1, :length], types=types[line : line + 1, :length]
        )
        assert (padded[line, :length] - double_model(alone)[0]).abs().max() < 1e-12


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


def test_a_sequence_longer_than_the_positions() -> None:
    batch = ModelInputs(ids=torch.ones(1, 17, dtype=torch.long), types=torch.zeros(1, 17).long())
    with pytest.raises(ValueError, match="sequences of 17 tokens; the model has 16 positions"):
        our_model(TINY, ())(batch)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"chat": 2}, "no task 'chat'; there are fill-mask,"),
        ({"fill-mask": 49}, "fill-mask has 49 outputs; it needs 50"),
        ({"text-classification": 0}, "text-classification has 0 outputs; it needs at least 1"),
        ({"text-classification": 2, "multiple-choice": 1}, "under one name"),
    ],
)
def test_heads_that_cannot_be(tasks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlbertForTasks(TINY, tasks)


@pytest.mark.parametrize(
    ("embedding_size", "sharing", "num_millions"),
    [
        (128, "all", 12),
        (128, "attention", 64),
        (128, "ffn", 38),
        (128, "none", 89),
        (768, "all", 31),
        (768, "attention", 83),
        (768, "ffn", 57),
        (768, "none", 108),
    ],
)
def test_models_have_the_paper_s_sizes(
    embedding_size: int, sharing: Sharing, num_millions: int
) -> None:
    """Table 4, of base models; within 3 %, since it has whole millions, some rounded down."""
    config = preset("base", embedding_size=embedding_size, sharing=sharing)
    with torch.device("meta"):
        model = AlbertForTasks(config, head_sizes(config, ("sentence-order",)))
    assert model.pooler is not None
    unique = {id(p): p for part in (model.albert, model.pooler) for p in part.parameters()}
    sizes = [p.numel() for p in unique.values()]
    assert sum(sizes) == config.num_backbone_params
    assert sum(sizes) == pytest.approx(num_millions * 1e6, rel=0.03)


COUNTS = np.arange(50) ** 2
CONFIG = replace(
    TINY, embedding_size=64, hidden_size=128, num_heads=4, num_groups=2, max_positions=32
)


@pytest.fixture
def model() -> AlbertForTasks:
    torch.manual_seed(0)
    made = AlbertForTasks(CONFIG, {"fill-mask": 50})
    start_local(made, COUNTS)
    return made.eval()


@torch.no_grad()
def test_it_predicts_the_corpus_frequencies(model: AlbertForTasks) -> None:
    logits = model.logits("fill-mask", model(ragged((16, 16))).flatten(0, 1))
    smoothed = torch.from_numpy((COUNTS + 1) / (COUNTS + 1).sum()).float()
    predicted = logits.softmax(-1).mean(0)
    entropy = -(smoothed * smoothed.log()).sum()
    assert -(smoothed * predicted.log()).sum() < 1.1 * entropy


@torch.no_grad()
def test_each_head_looks_at_one_neighbour(model: AlbertForTasks) -> None:
    """Head 0 one back, head 1 one ahead, head 2 two back, head 3 two ahead."""
    batch = ragged((32, 32, 32))
    x_bsh = model.albert.embeddings(batch.ids, batch.types, None)
    for block in model.albert.encoder.attentions:
        assert isinstance(block, Attention)
        query, key = (
            part(x_bsh).unflatten(-1, (4, -1)).transpose(1, 2) for part in (block.query, block.key)
        )
        seen = (query @ key.transpose(-1, -2)).argmax(-1)[:, :, 2:-2]
        offsets = seen - torch.arange(2, 30)
        for head, expected in enumerate((-1, 1, -2, 2)):
            assert (offsets[:, head] == expected).float().mean() > 0.9
