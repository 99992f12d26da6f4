"""Feeds give every example once an epoch, in batches of a bounded number of tokens."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import TINY, our_model
from training.datasets import LabelledText
from training.feeds import (
    LabelledExample,
    classification_feed,
    cut_batches,
    labelled_examples,
    like_lengths,
    pad,
    pretrain_batches,
    pretrain_feed,
    span_feed,
)
from training.losses import score
from training.masking import NgramMasking
from training.run import RunError
from training.shards import Shards
from training.spans import SpanExample

CPU = torch.device("cpu")
EXAMPLES = [
    LabelledExample(ids=[2, *range(5, 5 + size), 3], types=[0] * (size + 2), label=size % 3)
    for size in range(1, 13)
]
SPANS = [
    SpanExample(
        ids=[2, 7, 3, *range(9, 9 + size), 3], types=[0] * 3 + [1] * (size + 1), start=s, end=e
    )
    for size, s, e in ((4, 3, 5), (9, 0, 0), (2, 4, 4))
]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=80),
    st.integers(1, 120),
    st.integers(0, 9),
)
def test_each_epoch_has_every_example_once(lengths: list[int], tokens: int, seed: int) -> None:
    batches = like_lengths(lengths, tokens_a_batch=tokens, seed=seed)
    epochs = []
    for _ in range(2):
        taken: list[list[int]] = []
        while sum(map(len, taken)) < len(lengths):
            taken.append(next(batches))
        assert sorted(index for batch in taken for index in batch) == list(range(len(lengths)))
        for batch in taken:
            longest = max(lengths[index] for index in batch)
            assert len(batch) == 1 or len(batch) * longest <= tokens
        epochs.append(taken)
    again = like_lengths(lengths, tokens_a_batch=tokens, seed=seed)
    assert list(islice(again, len(epochs[0]) + len(epochs[1]))) == epochs[0] + epochs[1]


def test_epochs_differ_and_lengths_are_alike() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 400).tolist()
    batches = like_lengths(lengths, tokens_a_batch=400, seed=0)
    taken = list(islice(batches, 200))
    assert len({tuple(sorted(batch)) for batch in taken}) > 100
    spread = [np.ptp([lengths[i] for i in batch]) for batch in taken if len(batch) > 1]
    assert np.mean(spread) < 10


def test_batches_are_cut_by_their_longest() -> None:
    sizes = np.array([1, 2, 3, 4, 50])
    cut = cut_batches(np.arange(5), sizes, 8)
    assert cut == [[0, 1], [2, 3], [4]]
    assert cut_batches(np.arange(0), sizes, 8) == []


def test_padding_is_on_the_right() -> None:
    batch = pad([([2, 9, 3], [0, 0, 1]), ([2, 3], [0, 1])])
    assert batch.ids.tolist() == [[2, 9, 3], [2, 3, 0]]
    assert batch.types.tolist() == [[0, 0, 1], [0, 1, 0]]
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [3, 2]


def test_classification_reads_the_cls_row() -> None:
    model = our_model(TINY, ("text-classification",))
    feed = classification_feed(EXAMPLES, tokens_a_batch=40, seed=0)
    assert feed.tasks == (feed.name,) == ("text-classification",)
    num_labels: Counter[int] = Counter()
    total, count = 0.0, 0
    while count < len(EXAMPLES):
        scored = next(feed.scorers)(model, CPU)
        one = scored.scores["text-classification"]
        total, count = total + one.loss.item(), count + one.count
        num_labels[scored.num_tokens] += 1
    assert sum(size * n for size, n in num_labels.items()) == sum(len(e.ids) for e in EXAMPLES)
    expected = 0.0
    with torch.no_grad():
        for example in EXAMPLES:
            hidden = model(pad([(example.ids, example.types)]))
            logits = model.logits("text-classification", hidden[:, 0])
            expected += score(logits, torch.tensor([example.label])).loss.item()
    assert total == pytest.approx(expected, rel=1e-4)


def test_spans_are_scored_over_real_positions_alone() -> None:
    model = our_model(TINY, ("question-answering",))
    together = next(span_feed(SPANS, tokens_a_batch=1000, seed=0).scorers)(model, CPU)
    alone = [
        next(span_feed([span], tokens_a_batch=1000, seed=0).scorers)(model, CPU) for span in SPANS
    ]
    got = together.scores["question-answering"]
    parts = [one.scores["question-answering"] for one in alone]
    assert got.count == 3
    assert got.loss.item() == pytest.approx(sum(part.loss.item() for part in parts), rel=1e-4)
    assert got.right.item() == sum(part.right.item() for part in parts)
    assert together.num_tokens == sum(len(span.ids) for span in SPANS)
    with torch.no_grad():
        hidden = model(pad([(SPANS[0].ids, SPANS[0].types)]))
        logits = model.logits("question-answering", hidden[0]).log_softmax(0)
    assert parts[0].loss.item() == pytest.approx(
        -(logits[3, 0] + logits[5, 1]).item() / 2, rel=1e-4
    )


def test_texts_over_the_length_are_left_out_and_counted(tokenizer: AlbertTokenizer) -> None:
    texts = [
        LabelledText(text="the end", pair=None, label=1),
        LabelledText(text="the end " * 9, pair=None, label=0),
        LabelledText(text="the", pair="end", label=0),
    ]
    kept, num_long = labelled_examples(texts, tokenizer, length=12)
    assert num_long == 1
    assert [example.label for example in kept] == [1, 0]
    assert kept[1].ids == tokenizer.encode("the", "end").ids
    assert kept[1].types == tokenizer.encode("the", "end").types


@pytest.fixture
def small_shards() -> Shards:
    """Ten documents of two sentences."""
    return Shards(
        tokens=np.arange(200, dtype=np.uint16) % 40 + 5,
        sentences=np.arange(0, 201, 10),
        documents=np.arange(0, 21, 2),
    )


MASKING = NgramMasking(word_starts=np.ones(50, bool))


def test_pretraining_goes_on_epoch_after_epoch(small_shards: Shards) -> None:
    def batches() -> list[list[int]]:
        stream = pretrain_batches(small_shards, MASKING, length=30, batch_size=4, seed=0)
        return [make().tokens.ids.flatten().tolist() for make in islice(stream, 9)]

    first = batches()
    assert first == batches()
    assert len({tuple(ids) for ids in first}) == 9


def test_pretraining_scores_both_heads(small_shards: Shards) -> None:
    model = our_model(TINY, ("fill-mask", "sentence-order"))
    feed = pretrain_feed(small_shards, MASKING, length=16, batch_size=4, seed=0)
    scored = next(feed.scorers)(model, CPU)
    assert tuple(scored.scores) == feed.tasks == ("fill-mask", "sentence-order")
    assert scored.scores["fill-mask"].count >= 4
    assert 0 < scored.num_tokens <= 64


def test_a_corpus_that_fills_no_batch_is_refused_at_once(small_shards: Shards) -> None:
    with pytest.raises(RunError, match=r"gives 1\d examples, less than one batch of 99; give more"):
        pretrain_feed(small_shards, MASKING, length=30, batch_size=99, seed=0)
