"""Our model computes what `transformers` does, and holds each shared weight once."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from albert_serve.config import AlbertConfig, Sharing
from albert_serve.errors import ConfigError
from tests.training.support import (
    TINY,
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


def test_a_sequence_longer_than_the_positions() -> None:
    batch = ModelInputs(ids=torch.ones(1, 17, dtype=torch.long), types=torch.zeros(1, 17).long())
    with pytest.raises(ValueError, match="17 tokens, more than the model's 16 positions"):
        our_model(TINY, ())(batch)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"chat": 2}, "'chat' is not a task. Choose one of fill-mask,"),
        ({"fill-mask": 49}, "fill-mask has 49 outputs. It must have 50"),
        ({"text-classification": 0}, "text-classification has 0 outputs. It must have at least 1"),
        ({"text-classification": 2, "multiple-choice": 1}, "the same name for their weights"),
    ],
)
def test_heads_that_cannot_be(tasks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlbertForTasks(TINY, tasks)


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
def test_words_and_positions_have_equal_norms_in_separate_halves(model: AlbertForTasks) -> None:
    """Positions are sinusoids, from 2 radians a position to half a turn over all."""
    words, positions = (
        part.weight for part in (model.albert.embeddings.word, model.albert.embeddings.position)
    )
    assert positions.norm(dim=1) == pytest.approx(np.full(32, 0.4), rel=1e-5)
    assert 0.3 < words.norm(dim=1).mean() < 0.4
    assert not words[:, :32].any()
    assert not positions[:, 32:].any()
    assert positions[1, 0] == pytest.approx(0.1 * math.sin(2.0))
    assert positions[16, 31].abs() < 1e-6


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
        scores_bnss = query @ key.transpose(-1, -2) / 32**0.5
        weights_bnss, seen_bns = scores_bnss.softmax(-1).max(-1)
        offsets = seen_bns[:, :, 2:-2] - torch.arange(2, 30)
        for head, expected in enumerate((-1, 1, -2, 2)):
            assert (offsets[:, head] == expected).float().mean() > 0.9
            assert 0.7 < weights_bnss[:, head, 2:-2].mean() < 0.9
