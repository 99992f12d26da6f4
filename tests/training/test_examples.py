"""Examples hold consecutive sentences, half of them swapped, the same for the same index."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.tokenizer import AlbertTokenizer
from training.examples import IGNORED, Examples, build_examples, epoch_order
from training.masking import NgramMasking, word_starts
from training.shards import Shards

LENGTH = 64


@pytest.fixture(scope="module")
def masking(tokenizer: AlbertTokenizer) -> NgramMasking:
    return NgramMasking(word_starts=word_starts(tokenizer))


@pytest.fixture(scope="module")
def examples(shards: Shards, masking: NgramMasking) -> Examples:
    return build_examples(shards, masking, length=LENGTH, seed=3, epoch=0)


def in_corpus_order(examples: Examples) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """The bounds with swapped pairs swapped back."""
    bounds = examples.bounds.copy()
    swapped = examples.orders == 1
    bounds[swapped] = bounds[swapped][:, [2, 3, 0, 1]]
    return bounds


def test_half_of_the_pairs_are_swapped(examples: Examples) -> None:
    pairs = examples.orders[examples.orders != IGNORED]
    assert len(pairs) > 300
    assert set(pairs.tolist()) == {0, 1}
    assert abs(pairs.mean() - 0.5) < 0.08


def test_segments_are_consecutive_sentences_of_one_document(
    examples: Examples, shards: Shards
) -> None:
    """Truncation takes from the ends of segments, so that at most sentences become shorter."""
    starts = shards.sentences
    documents = starts[shards.documents]
    bounds = in_corpus_order(examples)
    for begin, end, next_begin, next_end in bounds.tolist():
        assert begin < end <= next_begin <= next_end
        assert np.searchsorted(documents, begin, "right") == np.searchsorted(
            documents, max(end, next_end), "left"
        )
        if next_begin < next_end:  # the cut lies between them: both reach it, but for truncation
            cut = starts[(starts >= end) & (starts <= next_begin)]
            assert len(cut) >= 1


def test_every_token_of_a_document_is_used_but_for_truncation(
    examples: Examples, shards: Shards
) -> None:
    """Chunks follow each other without gap or overlap."""
    whole = build_examples(shards, examples.masking, length=10**6, seed=0, epoch=0, short_rate=0.0)
    assert len(whole) == shards.num_documents
    bounds = in_corpus_order(whole)
    assert (bounds[:, 1] == bounds[:, 2]).all()
    assert bounds[0, 0] == 0
    assert (bounds[1:, 0] == bounds[:-1, 3]).all()
    assert bounds[-1, 3] == len(shards.tokens)


def test_a_pair_is_built_as_bert_has_it(examples: Examples, shards: Shards) -> None:
    unmasked = replace(
        examples, masking=NgramMasking(word_starts=np.zeros_like(examples.masking.word_starts))
    )
    both = [int(np.flatnonzero(examples.orders == order)[0]) for order in (0, 1)]
    for index in both:
        batch = unmasked.batch(np.array([index]))
        begin, end, next_begin, next_end = examples.bounds[index].tolist()
        first, second = shards.tokens[begin:end], shards.tokens[next_begin:next_end]
        tokens = [2, *first.tolist(), 3, *second.tolist(), 3]
        restored = batch.tokens.ids[0].clone()
        restored[batch.rows] = batch.targets
        assert restored[: len(tokens)].tolist() == tokens
        assert not restored[len(tokens) :].any()
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        assert batch.tokens.types[0].tolist() == types + [0] * (LENGTH - len(tokens))
        assert batch.tokens.lengths is not None
        assert batch.tokens.lengths.tolist() == [len(tokens)]
        assert batch.orders.tolist() == [examples.orders[index]]


def test_a_swapped_pair_holds_the_later_text_first(
    examples: Examples, shards: Shards, tokenizer: AlbertTokenizer
) -> None:
    for index in np.flatnonzero(examples.orders == 1)[:50].tolist():
        assert examples.bounds[index, 2] < examples.bounds[index, 3] <= examples.bounds[index, 0]
    index = int(np.flatnonzero(examples.orders == 1)[0])
    batch = examples.batch(np.array([index]))
    ids = batch.tokens.ids[0].clone()
    ids[batch.rows] = batch.targets
    second = ids[(batch.tokens.types[0] == 1) & (ids != 3)].tolist()
    begin, end = examples.bounds[index, 2:].tolist()
    assert tokenizer.decode(second, keep_special=True) == tokenizer.decode(
        shards.tokens[begin:end].tolist(), keep_special=True
    )


@settings(deadline=None, max_examples=20)
@given(st.integers(8, 300), st.integers(0, 10**6), st.integers(0, 3))
def test_no_example_is_over_its_length(
    shards: Shards, masking: NgramMasking, length: int, seed: int, epoch: int
) -> None:
    built = build_examples(shards, masking, length=length, seed=seed, epoch=epoch)
    sizes = built.bounds[:, 1::2] - built.bounds[:, ::2]
    is_pair = built.orders != IGNORED
    assert (sizes[:, 0] > 0).all()
    assert ((sizes[:, 1] > 0) == is_pair).all()
    assert (sizes.sum(1) <= length - 3).all()
    index = int(sizes.sum(1).argmax())
    batch = built.batch(np.array([0, index, len(built) - 1]))
    assert batch.tokens.ids.shape == (3, length)
    assert batch.tokens.lengths is not None
    assert int(batch.tokens.lengths[1]) == sizes[index].sum() + (3 if is_pair[index] else 2)


def test_truncation_takes_from_both_ends_of_the_longer_segment() -> None:
    """A document of a long and a short sentence: the short one stays whole."""
    shards = Shards(
        tokens=np.arange(5, 1005, dtype=np.int32) % 90 + 5,
        sentences=np.array([0, 10, 1000]),
        documents=np.array([0, 2]),
    )
    masking = NgramMasking(word_starts=np.ones(100, bool))
    fronts = []
    for seed in range(40):
        built = build_examples(shards, masking, length=103, seed=seed, epoch=0, short_rate=0.0)
        begin, end, next_begin, next_end = in_corpus_order(built)[0].tolist()
        assert (begin, end) == (0, 10)
        assert next_end - next_begin == 90
        fronts.append(next_begin - 10)
    assert abs(np.mean(fronts) - 450) < 15


def test_a_chunk_of_one_sentence_has_no_order(masking: NgramMasking) -> None:
    shards = Shards(
        tokens=np.full(30, 50, np.uint16),
        sentences=np.array([0, 10, 30]),
        documents=np.array([0, 1, 2]),
    )
    built = build_examples(shards, masking, length=20, seed=0, epoch=0)
    assert built.orders.tolist() == [IGNORED, IGNORED]
    batch = built.batch(np.array([0, 1]))
    assert batch.orders.tolist() == [IGNORED, IGNORED]
    assert not batch.tokens.types.any()
    assert batch.tokens.lengths is not None
    assert batch.tokens.lengths.tolist() == [12, 19]
    assert batch.tokens.ids[0, 11] == 3


def test_short_targets_are_drawn_for_a_tenth_of_the_documents(masking: NgramMasking) -> None:
    num_documents = 4000
    shards = Shards(
        tokens=np.full(num_documents * 100, 50, np.uint16),
        sentences=np.arange(0, num_documents * 100 + 1, 10),
        documents=np.arange(0, num_documents * 10 + 1, 10),
    )
    full = build_examples(shards, masking, length=103, seed=0, epoch=0, short_rate=0.0)
    some = build_examples(shards, masking, length=103, seed=0, epoch=0)
    assert len(full) == num_documents
    starts = in_corpus_order(some)[:, 0] // 100
    num_short = (np.bincount(starts) > 1).sum()
    # A target over 90 tokens still takes the whole document.
    assert abs(num_short / num_documents - 0.1 * 89 / 99) < 0.02


def test_the_cut_is_at_any_sentence(masking: NgramMasking) -> None:
    shards = Shards(
        tokens=np.full(40_000, 50, np.uint16),
        sentences=np.arange(0, 40_001, 10),
        documents=np.arange(0, 4001, 4),
    )
    built = build_examples(shards, masking, length=103, seed=0, epoch=0, short_rate=0.0)
    cuts = np.bincount((in_corpus_order(built)[:, 1] % 40) // 10, minlength=4)
    assert cuts[0] == 0
    assert cuts[1:].min() > 280


def test_an_example_depends_on_its_index_alone(examples: Examples) -> None:
    together = examples.batch(np.array([4, 7, 2]))
    assert together.tokens.lengths is not None
    for line, index in enumerate((4, 7, 2)):
        alone = examples.batch(np.array([index]))
        assert together.tokens.ids[line].tolist() == alone.tokens.ids[0].tolist()
        of_line = (together.rows // LENGTH) == line
        assert (together.rows[of_line] - line * LENGTH).tolist() == alone.rows.tolist()
        assert together.targets[of_line].tolist() == alone.targets.tolist()


def test_rows_point_at_the_masked_tokens(examples: Examples) -> None:
    batch = examples.batch(np.arange(50))
    seen = batch.tokens.ids.flatten()[batch.rows]
    assert 0.7 < float((seen == 4).float().mean()) < 0.9
    assert not (batch.targets < 5).any()
    others = np.setdiff1d(np.arange(50 * LENGTH), batch.rows.numpy())
    assert not (batch.tokens.ids.flatten()[others] == 4).any()


def test_epochs_differ_and_come_back(shards: Shards, masking: NgramMasking) -> None:
    def first(seed: int, epoch: int) -> list[int]:
        built = build_examples(shards, masking, length=LENGTH, seed=seed, epoch=epoch)
        ids: list[int] = built.batch(np.arange(4)).tokens.ids.flatten().tolist()
        return ids

    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(0, 1)
    assert first(0, 0) != first(1, 0)


def test_the_order_is_a_permutation_of_its_own_in_each_epoch() -> None:
    orders = [epoch_order(100, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order.tolist()) == list(range(100)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert epoch_order(100, seed=0, epoch=1).tolist() == orders[1].tolist()
