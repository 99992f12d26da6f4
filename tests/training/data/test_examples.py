"""Examples are segments and labels as in the original code, or pairs of complete sentences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.support import corpora, make_part, make_shards
from training.data.collate import Slicing
from training.data.examples import IGNORED, Examples, ExampleSettings, SentenceTask, build_examples
from training.data.packing import Plan
from training.data.shards import Shards
from training.data.streams import PackedStream
from training.errors import TrainingError
from training.tasks.pretraining.files import OrderBatch, OrderCollator


def build(
    documents: Sequence[Sequence[int]], task: SentenceTask, length: int, *, seed: int = 0
) -> Examples:
    """Build the examples of documents with these sentence lengths, without short examples."""
    example_settings = ExampleSettings(length=length, sentence_task=task, short_rate=0.0)
    return build_examples(make_part(documents), example_settings, seed=seed, epoch=0)


def truncated(first: int, second: int, max_tokens: int) -> tuple[int, int]:
    """Return the sizes after truncate_seq_pair of create_pretraining_data.py."""
    while first + second > max_tokens:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


def chunk_end(bounds: Sequence[int], first: int, target: int) -> int:
    """Return the end of the chunk that starts at sentence `first`, as the original's loop does."""
    last = first
    while last < len(bounds) - 1:
        last += 1
        if bounds[last] - bounds[first] >= target:
            break
    return last


def is_truncation(segment: tuple[int, int], begin: int, end: int, size: int) -> bool:
    """Return whether `segment` can be the tokens from `begin` to `end`, truncated to `size`."""
    return begin <= segment[0] and segment[1] <= end and segment[1] - segment[0] == size


def document_bounds(documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the bounds of each document's sentences, in tokens of the corpus."""
    begins = [0, *accumulate(map(sum, documents))]
    return [
        [begin, *(begin + end for end in accumulate(lengths))]
        for begin, lengths in zip(begins, documents, strict=False)
    ]


@settings(deadline=None, max_examples=120)
@given(st.sampled_from(["sop", "none"]), corpora, st.integers(8, 70), st.integers(0, 2**40))
def test_segments_are_parts_of_the_original_code_s_chunks(
    task: SentenceTask, documents: list[list[int]], length: int, seed: int
) -> None:
    """A chunk of several sentences is split after one of them. Truncation is the original's."""
    max_tokens = length - (3 if task == "sop" else 2)
    examples = build(documents, task, length, seed=seed)
    assert (examples.sizes <= length).all()
    rows = iter(zip(examples.bounds.tolist(), examples.labels.tolist(), strict=True))
    for bounds in document_bounds(documents):
        first = 0
        while first < len(bounds) - 1:
            last = chunk_end(bounds, first, max_tokens)
            begin, end = bounds[first], bounds[last]
            (a, b, c, d), label = next(rows)
            if task == "none" or last - first == 1:
                assert label == IGNORED
                assert is_truncation((a, b), begin, end, min(end - begin, max_tokens))
                assert c == d
            else:
                assert label in (0, 1)
                splits = [[(begin, split), (split, end)] for split in bounds[first + 1 : last]]
                assert any(
                    is_truncation((a, b), w, x, sizes[0]) and is_truncation((c, d), y, z, sizes[1])
                    for split in splits
                    for (w, x), (y, z) in [split[::-1] if label == 1 else split]
                    for sizes in [truncated(x - w, z - y, max_tokens)]
                )
            first = last
    assert next(rows, None) is None


@settings(deadline=None, max_examples=60)
@given(corpora.filter(lambda documents: len(documents) > 1), st.integers(8, 70), st.integers(0, 99))
def test_nsp_has_label_0_for_the_next_segment_and_1_for_another_document(
    documents: list[list[int]], length: int, seed: int
) -> None:
    begins = [bounds[0] for bounds in document_bounds(documents)]
    examples = build(documents, "nsp", length, seed=seed)
    assert len(examples.labels) >= len(documents)
    for (a, b, c, d), label in zip(examples.bounds.tolist(), examples.labels.tolist(), strict=True):
        first, second = (bisect_right(begins, begin) for begin in (a, c))
        assert label == (first != second)
        assert a < b
        assert c < d
        assert label == 1 or b <= c


@pytest.mark.parametrize("task", ["sop", "nsp", "none"])
def test_examples_are_determined_by_the_seed_the_epoch_and_the_part(task: SentenceTask) -> None:
    part = make_part([[5, 9, 3, 7, 12] * 4] * 20)
    example_settings = ExampleSettings(length=64, sentence_task=task, short_rate=0.5)
    keys: list[bytes] = []
    for seed, epoch, number in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        for _ in range(2):
            examples = build_examples(part, example_settings, seed=seed, epoch=epoch, number=number)
            keys.append(examples.bounds.tobytes() + examples.labels.tobytes())
        assert keys[-1] == keys[-2]
    assert len(set(keys)) == 4


def test_excess_tokens_are_removed_from_both_ends_alike() -> None:
    examples = build([[100]] * 200, "none", 52)
    assert (examples.bounds[:, 0] % 100).mean() == pytest.approx(25, abs=1)


PAIRS = ExampleSettings(length=128, sentence_task="pairs", min_sentences=2)


def pair_stream(shards: Shards) -> PackedStream:
    return PackedStream(
        plan=Plan(shards=shards, settings=PAIRS, seed=3),
        collate=OrderCollator(shards=shards, length=PAIRS.length),
        slicing=Slicing(num_rows=4, rows_per_batch=4),
        num_workers=0,
        name="sentence-order",
        additional_losses=("paired-order",),
    )


def sequences(batch: OrderBatch) -> list[list[int]]:
    """Return the tokens of each pair: all pairs in order, then all pairs swapped."""
    ids = batch.tokens.ids.flatten()
    assert batch.tokens.packing is not None
    numbers = batch.tokens.packing.sequences.flatten()
    firsts = batch.firsts[batch.labels != IGNORED].tolist()
    sizes = [int((numbers[cls:] == numbers[cls]).long().cumprod(0).sum()) for cls in firsts]
    return [ids[cls : cls + size].tolist() for cls, size in zip(firsts, sizes, strict=True)]


@settings(deadline=None, max_examples=80)
@given(corpora, st.integers(10, 90), st.integers(1, 3), st.integers(0, 2**40), st.floats(0, 1))
def test_both_segments_of_a_pair_are_adjacent_complete_sentences_of_a_document(
    documents: list[list[int]], length: int, min_sentences: int, seed: int, short_rate: float
) -> None:
    part = make_part(documents)
    example_settings = ExampleSettings(
        length=length, sentence_task="pairs", min_sentences=min_sentences, short_rate=short_rate
    )
    examples = build_examples(part, example_settings, seed=seed, epoch=0)
    assert (examples.labels == 0).all()
    assert (examples.sizes <= length).all()
    begins = part.sentences[part.documents]
    for a, b, c, d in examples.bounds.tolist():
        assert a < b == c < d
        assert np.isin([a, b, d], part.sentences).all()
        first, second, end = np.searchsorted(part.sentences, [a, b, d])
        assert min(second - first, end - second) >= min_sentences
        assert np.searchsorted(begins, a, "right") == np.searchsorted(begins, d, "left")
    assert (examples.bounds[1:, 0] >= examples.bounds[:-1, 3]).all()


@pytest.mark.parametrize(("length", "num_pairs"), [(12, 1), (11, 0)])
def test_a_pair_may_be_as_long_as_the_length(length: int, num_pairs: int) -> None:
    """A pair has three special tokens."""
    pairs = build_examples(
        make_part([[5, 4]]), ExampleSettings(length=length, sentence_task="pairs"), seed=0, epoch=0
    )
    assert len(pairs.labels) == num_pairs


def test_single_sentences_of_a_pair_have_at_least_8_tokens_and_similar_lengths() -> None:
    part = make_part([[8, 9], [7, 8], [10, 12], [20, 25], [7, 8, 8, 9, 9]])
    example_settings = replace(PAIRS, min_sentences=1, single_sentences=True)
    bounds = build_examples(part, example_settings, seed=0, epoch=0).bounds
    assert (bounds[:, 1::2] - bounds[:, ::2]).tolist() == [[8, 9], [10, 12], [8, 8], [9, 9]]


def test_a_batch_has_each_pair_in_both_orders_and_no_mask(shards: Shards) -> None:
    stream = pair_stream(shards)
    assert stream.tasks == ("sentence-order",)
    assert stream.losses == ("sentence-order", "paired-order")
    (batch,) = stream.step()
    assert isinstance(batch, OrderBatch)
    assert len(batch.tokens.ids) == 2 * 4
    in_order, swapped = np.split(np.array(sequences(batch), object), 2)
    num_pairs = batch.counts["paired-order"]
    assert num_pairs == len(in_order) >= 4
    assert batch.counts["sentence-order"] == 2 * num_pairs
    assert batch.labels[batch.labels != IGNORED].tolist() == [0] * num_pairs + [1] * num_pairs
    text = shards.parts[0].tokens.tolist()
    for pair, swapped_pair in zip(in_order, swapped, strict=True):
        cls, *first, sep = pair[: pair.index(3) + 1]
        *second, end = pair[pair.index(3) + 1 :]
        assert swapped_pair == [cls, *second, sep, *first, end]
        size = len(first + second)
        assert first + second in (text[start : start + size] for start in range(len(text)))
    assert not (batch.tokens.ids == 4).any()
    assert batch.num_tokens == sum(map(len, [*in_order, *swapped]))


def test_a_corpus_without_a_pair_is_an_error() -> None:
    shards = make_shards(make_part([[5], [7]]))
    with pytest.raises(TrainingError, match="No document has enough sentences"):
        pair_stream(shards).step()
