"""Pairs of whole sentences, which stand in a batch in both orders, and their losses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.support import corpora, make_part, make_shards
from training.data.collate import Slicing
from training.data.examples import IGNORED, ExampleSettings, build_examples
from training.data.packing import Plan
from training.data.shards import Shards
from training.data.streams import PackedStream
from training.errors import TrainingError
from training.model.albert import ModelInputs
from training.tasks.pretraining.files import OrderBatch, OrderCollator
from training.tasks.pretraining.loss import paired_order_loss

PAIRS = ExampleSettings(length=128, sentence_task="pairs", min_sentences=2)


def stream_of(
    shards: Shards, chosen: ExampleSettings = PAIRS, *, num_workers: int = 0
) -> PackedStream:
    return PackedStream(
        plan=Plan(shards=shards, settings=chosen, seed=3),
        collate=OrderCollator(shards=shards, length=chosen.length),
        slicing=Slicing(num_rows=4, rows_a_batch=4),
        num_workers=num_workers,
        name="sentence-order",
        further_losses=("paired-order",),
    )


def sequences(batch: OrderBatch) -> list[list[int]]:
    """The tokens of each pair: all in order, then all swapped."""
    ids = batch.tokens.ids.flatten()
    assert batch.tokens.packing is not None
    numbers = batch.tokens.packing.sequences.flatten()
    rows = [
        (numbers[first:] == numbers[first]).long().cumprod(0).sum()
        for first in batch.firsts[batch.labels != IGNORED].tolist()
    ]
    firsts = batch.firsts[batch.labels != IGNORED].tolist()
    return [ids[at : at + int(size)].tolist() for at, size in zip(firsts, rows, strict=True)]


def only(batches: Iterable[object]) -> OrderBatch:
    (batch,) = batches
    assert isinstance(batch, OrderBatch)
    return batch


@settings(deadline=None, max_examples=80)
@given(corpora, st.integers(10, 90), st.integers(1, 3), st.integers(0, 2**40), st.floats(0, 1))
def test_both_segments_are_whole_neighbouring_sentences_of_a_document(
    documents: list[list[int]], length: int, least: int, seed: int, short_rate: float
) -> None:
    part = make_part(documents)
    chosen = ExampleSettings(
        length=length, sentence_task="pairs", min_sentences=least, short_rate=short_rate
    )
    examples = build_examples(part, chosen, seed=seed, epoch=0)
    assert (examples.labels == 0).all()
    assert (examples.sizes <= length).all()
    begins = part.sentences[part.documents]
    for a, b, c, d in examples.bounds.tolist():
        assert a < b == c < d
        assert np.isin([a, b, d], part.sentences).all()
        first, cut, last = np.searchsorted(part.sentences, [a, b, d])
        assert min(cut - first, last - cut) >= least
        assert np.searchsorted(begins, a, "right") == np.searchsorted(begins, d, "left")
    assert (examples.bounds[1:, 0] >= examples.bounds[:-1, 3]).all()


def test_sentences_that_no_pair_has_room_for_are_skipped() -> None:
    part = make_part([[5, 5, 90, 15, 15], [90, 5]])
    chosen = ExampleSettings(length=33, sentence_task="pairs", short_rate=0.0)
    examples = build_examples(part, chosen, seed=0, epoch=0)
    assert examples.bounds.tolist() == [[0, 5, 5, 10], [100, 115, 115, 130]]


def test_single_sentences_are_of_like_lengths() -> None:
    """The longer has at most a fifth more tokens, and none has fewer than eight."""
    part = make_part([[7, 7, 20, 24, 10, 13, 12], [8, 9], [60, 60]])
    chosen = ExampleSettings(length=103, sentence_task="pairs", single_sentences=True)
    examples = build_examples(part, chosen, seed=0, epoch=0)
    assert examples.bounds.tolist() == [[14, 34, 34, 58], [68, 81, 81, 93], [93, 101, 101, 110]]


def test_a_batch_has_each_pair_in_both_orders_and_no_mask(shards: Shards) -> None:
    stream = stream_of(shards)
    assert (stream.tasks, stream.losses) == (
        ("sentence-order",),
        ("sentence-order", "paired-order"),
    )
    batch = only(stream.step())
    in_order, swapped = np.split(np.array(sequences(batch), object), 2)
    num_pairs = batch.counts["paired-order"]
    assert num_pairs == len(in_order) >= 4
    assert batch.counts["sentence-order"] == 2 * num_pairs
    assert batch.labels[batch.labels != IGNORED].tolist() == [0] * num_pairs + [1] * num_pairs
    text = shards.parts[0].tokens.tolist()
    for one, other in zip(in_order, swapped, strict=True):
        cls, *first, sep = one[: one.index(3) + 1]
        *second, end = one[one.index(3) + 1 :]
        assert other == [cls, *second, sep, *first, end]
        assert first + second in (text[at : at + len(first + second)] for at in range(len(text)))
    assert not (batch.tokens.ids == 4).any()
    assert batch.num_tokens == sum(map(len, [*in_order, *swapped]))


def test_a_corpus_without_a_pair_is_an_error() -> None:
    shards = make_shards(make_part([[5], [7]]))
    with pytest.raises(TrainingError, match="no document of the corpus has sentences enough"):
        stream_of(shards).step()


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
