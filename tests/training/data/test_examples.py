"""Examples are the original code's segments and labels, or pairs of whole sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

Row = tuple[int, int, int, int]


def build(
    documents: Sequence[Sequence[int]], task: SentenceTask, length: int, *, seed: int = 0
) -> Examples:
    """Examples of full length of a corpus of these sentences."""
    chosen = ExampleSettings(length=length, sentence_task=task, short_rate=0.0)
    return build_examples(make_part(documents), chosen, seed=seed, epoch=0)


def rows(examples: Examples) -> Iterator[tuple[Row, int]]:
    """Bounds and label of each."""
    for bounds, label in zip(examples.bounds.tolist(), examples.labels.tolist(), strict=True):
        yield tuple(bounds), label


def truncated(first: int, second: int, room: int) -> tuple[int, int]:
    """The sizes that truncate_seq_pair of create_pretraining_data.py leaves."""
    while first + second > room:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


def chunk_end(bounds: Sequence[int], first: int, target: int) -> int:
    """The sentence that ends the chunk that begins at one: the original's loop."""
    last = first
    while last < len(bounds) - 1:
        last += 1
        if bounds[last] - bounds[first] >= target:
            break
    return last


def lies_within(segment: tuple[int, int], begin: int, end: int, size: int) -> bool:
    """Whether a segment is what truncation to `size` can leave of begin to end."""
    return begin <= segment[0] and segment[1] <= end and segment[1] - segment[0] == size


def document_bounds(documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """The bounds of each document's sentences, in tokens of the corpus."""
    begins = [0, *accumulate(map(sum, documents))]
    return [
        [begin, *(begin + end for end in accumulate(lengths))]
        for begin, lengths in zip(begins, documents, strict=False)
    ]


@settings(deadline=None, max_examples=120)
@given(st.sampled_from(["sop", "none"]), corpora, st.integers(8, 70), st.integers(0, 2**40))
def test_segments_are_cut_from_the_original_s_chunks(
    task: SentenceTask, documents: list[list[int]], length: int, seed: int
) -> None:
    """Each example is of its chunk, cut at a sentence's end if it has two, truncated as there."""
    room = length - (3 if task == "sop" else 2)
    examples = build(documents, task, length, seed=seed)
    assert (examples.sizes <= length).all()
    example_rows = rows(examples)
    for bounds in document_bounds(documents):
        first = 0
        while first < len(bounds) - 1:
            last = chunk_end(bounds, first, room)
            begin, end = bounds[first], bounds[last]
            (a, b, c, d), label = next(example_rows)
            if task == "none" or last - first == 1:
                assert label == IGNORED
                assert lies_within((a, b), begin, end, min(end - begin, room))
                assert c == d
            else:
                assert label in (0, 1)
                cuts = [(begin, cut, cut, end) for cut in bounds[first + 1 : last]]
                assert any(
                    lies_within((a, b), w, x, sizes[0]) and lies_within((c, d), y, z, sizes[1])
                    for p, q, r, s in cuts
                    for w, x, y, z in [(r, s, p, q) if label == 1 else (p, q, r, s)]
                    for sizes in [truncated(x - w, z - y, room)]
                )
            first = last
    assert next(example_rows, None) is None


@pytest.mark.parametrize("task", ["sop", "nsp", "none"])
def test_an_epoch_of_a_part_is_the_same_each_time_and_unlike_others(task: SentenceTask) -> None:
    part = make_part([[5, 9, 3, 7, 12] * 4] * 20)
    chosen = ExampleSettings(length=64, sentence_task=task, short_rate=0.5)
    keys: list[bytes] = []
    for seed, epoch, number in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        for _ in range(2):
            built = build_examples(part, chosen, seed=seed, epoch=epoch, number=number)
            keys.append(built.bounds.tobytes() + built.labels.tobytes())
        assert keys[-1] == keys[-2]
    assert len(set(keys)) == 4


PAIRS = ExampleSettings(length=128, sentence_task="pairs", min_sentences=2)


def stream_of(shards: Shards) -> PackedStream:
    return PackedStream(
        plan=Plan(shards=shards, settings=PAIRS, seed=3),
        collate=OrderCollator(shards=shards, length=PAIRS.length),
        slicing=Slicing(num_rows=4, rows_per_batch=4),
        num_workers=0,
        name="sentence-order",
        additional_losses=("paired-order",),
    )


def sequences(batch: OrderBatch) -> list[list[int]]:
    """The tokens of each pair: all in order, then all swapped."""
    ids = batch.tokens.ids.flatten()
    assert batch.tokens.packing is not None
    numbers = batch.tokens.packing.sequences.flatten()
    firsts = batch.firsts[batch.labels != IGNORED].tolist()
    sizes = [int((numbers[at:] == numbers[at]).long().cumprod(0).sum()) for at in firsts]
    return [ids[at : at + size].tolist() for at, size in zip(firsts, sizes, strict=True)]


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


def test_a_batch_has_each_pair_in_both_orders_and_no_mask(shards: Shards) -> None:
    stream = stream_of(shards)
    assert (stream.tasks, stream.losses) == (
        ("sentence-order",),
        ("sentence-order", "paired-order"),
    )
    (batch,) = stream.step()
    assert isinstance(batch, OrderBatch)
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
    with pytest.raises(TrainingError, match="No document has enough sentences"):
        stream_of(shards).step()
