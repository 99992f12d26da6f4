"""Sentence order is asked for in both orders of unmasked pairs, beside a probe without order."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.training.support import TINY, randomize
from training.data.batch import pad
from training.data.examples import Example, ExampleSettings, build_examples
from training.data.shards import Shard, Shards
from training.evaluation.sentence_order import order_figures, probe_accuracy
from training.model.heads import AlbertForTasks, head_sizes

SETTINGS = ExampleSettings(length=64, sentence_task="pairs", short_rate=0.0)


@pytest.fixture
def model() -> AlbertForTasks:
    torch.manual_seed(0)
    config = replace(TINY, vocab_size=800, max_positions=64)
    model = AlbertForTasks(config, head_sizes(config, ("fill-mask", "sentence-order"))).eval()
    randomize(model, seed=0)
    return model


def shards_of(documents: list[list[NDArray[np.int64]]]) -> Shards:
    sentences = [sentence for document in documents for sentence in document]
    part = Shard(
        tokens=np.concatenate(sentences).astype(np.int32),
        sentences=np.cumsum([0, *map(len, sentences)]),
        documents=np.cumsum([0, *map(len, documents)]),
    )
    return Shards(parts=(part,), tokenizer_sha256="", fingerprint="")


@torch.no_grad()
def test_figures_are_those_of_each_pair_alone(model: AlbertForTasks, shards: Shards) -> None:
    figures = order_figures(model, shards, replace(SETTINGS, sentence_task="sop"), "fp32")
    odds: list[list[float]] = []
    for number, part in enumerate(shards.parts):
        examples = build_examples(part, SETTINGS, seed=12345, epoch=0, number=number)
        for a, b, c, d in examples.bounds.tolist():
            odds.append([])
            for bounds in ((a, b, c, d), (c, d, a, b)):
                ids, second = Example(0, 0, 0, bounds, 0).tokens(part)
                types = (np.arange(len(ids)) >= second).astype(int)
                hidden = model(pad([(ids.tolist(), types.tolist())]))
                logits = model.logits("sentence-order", hidden[:, 0])[0]
                odds[-1].append(float(logits[0] - logits[1]))
    in_order, swapped = np.array(odds).T
    assert figures["sentence_order_pairs"] == len(odds) > 100
    losses = np.log1p(np.exp([-in_order, swapped]))
    assert figures["sentence_order_loss"] == pytest.approx(losses.mean(), rel=1e-4)
    right = np.array([in_order > 0, swapped < 0]).mean()
    assert figures["sentence_order_accuracy"] == pytest.approx(right)
    paired = (in_order > swapped).mean()
    assert figures["sentence_order_paired_accuracy"] == pytest.approx(paired)
    assert figures["sentence_order_probe_accuracy"] == probe_accuracy(shards, SETTINGS)


def test_the_probe_finds_words_that_say_which_segment_is_first() -> None:
    """Documents whose first half has low tokens, and whose second half has high ones."""
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(5, 100, 10) for _ in range(3)] + [rng.integers(80, 180, 10) for _ in range(3)]
        for _ in range(100)
    ]
    assert probe_accuracy(shards_of(documents), SETTINGS) > 0.85


def test_the_probe_is_at_chance_where_words_say_nothing_of_order() -> None:
    """Though it could fit the pairs that it is given: their tokens are more than they are."""
    rng = np.random.default_rng(0)
    documents = [[rng.integers(5, 700, 10) for _ in range(6)] for _ in range(300)]
    assert abs(probe_accuracy(shards_of(documents), SETTINGS) - 0.5) < 0.09


def test_without_pairs_there_is_no_figure(model: AlbertForTasks) -> None:
    alone = shards_of([[np.arange(5, 12)], [np.arange(7, 20)]])
    figures = order_figures(model, alone, SETTINGS)
    assert figures.pop("sentence_order_pairs") == 0
    assert all(math.isnan(value) for value in figures.values())
    few = shards_of([[np.arange(5, 12), np.arange(7, 20)]] * 4)
    assert math.isnan(probe_accuracy(few, SETTINGS))
