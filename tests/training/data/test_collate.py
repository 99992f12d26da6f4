"""A batch is what BERT reads, several sequences in a row, and the same however it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import corpora, make_part, make_shards
from training.data.batch import PretrainBatch
from training.data.collate import Collator, Slicing
from training.data.examples import IGNORED, Example, ExampleSettings, SentenceTask
from training.data.masking import NgramMasking, word_starts
from training.data.packing import MAX_IN_ROW, Plan, Position
from training.data.shards import Shards
from training.errors import TrainingError
from training.model.albert import Packing

LENGTH = 64
VOCAB_SIZE = 800
EVERY_TOKEN = NgramMasking(word_starts=np.ones(VOCAB_SIZE, bool))


@pytest.fixture(scope="module")
def collator(shards: Shards, tokenizer: AlbertTokenizer) -> Collator:
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    return Collator(shards=shards, masking=masking, length=LENGTH, seed=3)


@pytest.fixture(scope="module")
def plan(shards: Shards) -> Plan:
    return Plan(shards=shards, settings=ExampleSettings(length=LENGTH), seed=3)


def some_rows(plan: Plan, num_rows: int) -> list[list[Example]]:
    return next(plan.steps(num_rows, Position())).rows


def packing_of(batch: PretrainBatch) -> Packing:
    assert batch.tokens.packing is not None
    return batch.tokens.packing


def restored(batch: PretrainBatch) -> Tensor:
    """The ids as they were before they were masked, flattened."""
    ids = batch.tokens.ids.flatten().clone()
    ids[batch.rows[: batch.counts["fill-mask"]]] = batch.targets[: batch.counts["fill-mask"]]
    return ids


def as_bert(example: Example, shards: Shards) -> tuple[list[int], list[int]]:
    """Ids and types of [CLS] A [SEP] B [SEP], or of [CLS] A [SEP]."""
    tokens = shards.parts[example.part].tokens
    a, b, c, d = example.bounds
    ids, types = [2, *tokens[a:b].tolist(), 3], [0] * (b - a + 2)
    if c < d:
        ids, types = [*ids, *tokens[c:d].tolist(), 3], types + [1] * (d - c + 1)
    return ids, types


def assert_is_bert_s(
    batch: PretrainBatch, rows: Sequence[Sequence[Example]], shards: Shards
) -> None:
    """Every tensor of a batch against these rows of examples."""
    ids: list[int] = []
    types: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    begins: list[int] = []
    labels: list[int] = []
    for row in rows:
        first = len(ids)
        for number, example in enumerate(row):
            begins.append(len(ids))
            labels.append(example.label)
            one_ids, one_types = as_bert(example, shards)
            ids += one_ids
            types += one_types
            positions += range(len(one_ids))
            sequences += [number] * len(one_ids)
        num_padded = LENGTH - (len(ids) - first)
        for values, filler in ((ids, 0), (types, 0), (positions, 0), (sequences, -1)):
            values += [filler] * num_padded
    packing = packing_of(batch)
    assert restored(batch).tolist() == ids
    assert batch.tokens.types.flatten().tolist() == types
    assert packing.positions.flatten().tolist() == positions
    assert packing.sequences.flatten().tolist() == sequences
    assert batch.firsts[: len(begins)].tolist() == begins
    assert batch.labels[: len(labels)].tolist() == labels
    assert batch.num_tokens == sum(number >= 0 for number in sequences)
    assert batch.counts["sentence-order"] == sum(label != IGNORED for label in labels)
    assert batch.tokens.lengths is None


def assert_bounds_cover(batch: PretrainBatch) -> None:
    """As cu_seqlens: every sequence and all padding of a row is one span of its own."""
    packing = packing_of(batch)
    shape = batch.tokens.ids.shape
    bounds = packing.bounds.tolist()
    assert packing.bounds.dtype == torch.int32
    assert len(bounds) == MAX_IN_ROW * shape[0] + 1
    assert (bounds[0], bounds[-1]) == (0, shape.numel())
    assert bounds == sorted(bounds)
    row = torch.arange(shape[0])[:, None].expand(shape)
    own: list[int] = (row * (shape[1] + 1) + packing.sequences).flatten().tolist()
    spans = [set(own[begin:end]) for begin, end in pairwise(bounds) if begin < end]
    assert all(len(tokens) == 1 for tokens in spans)
    assert len(set.union(*spans)) == len(spans) == len(set(own))


def assert_is_padded(values: Tensor, num_real: int, filler: int) -> None:
    """A multiple of 64 long, and no longer than it has to be."""
    assert values.dtype == torch.int64
    assert len(values) % 64 == 0
    assert 0 <= len(values) - num_real < 64
    assert (values[num_real:] == filler).all()


@pytest.mark.parametrize("task", ["sop", "nsp", "none"])
@settings(deadline=None, max_examples=25)
@given(corpora, st.integers(1, 12), st.integers(0, 2**40))
def test_rows_of_any_corpus_are_bert_s(
    task: SentenceTask, documents: list[list[int]], num_rows: int, seed: int
) -> None:
    shards = make_shards(make_part(documents, VOCAB_SIZE))
    chosen = ExampleSettings(length=LENGTH, sentence_task=task)
    rows = some_rows(Plan(shards=shards, settings=chosen, seed=seed), num_rows)
    batch = Collator(shards=shards, masking=EVERY_TOKEN, length=LENGTH, seed=seed)(rows)
    assert_is_bert_s(batch, rows, shards)
    assert_bounds_cover(batch)
    num_sequences = sum(map(len, rows))
    assert_is_padded(batch.rows, batch.counts["fill-mask"], 0)
    assert_is_padded(batch.targets, batch.counts["fill-mask"], IGNORED)
    assert_is_padded(batch.firsts, num_sequences, 0)
    assert_is_padded(batch.labels, num_sequences, IGNORED)
    # Each sequence is masked by itself: at least one token, 15 % of them at most.
    sizes = [len(as_bert(example, shards)[0]) for row in rows for example in row]
    least = sum(max(1, round(0.15 * size)) for size in sizes)
    assert num_sequences <= batch.counts["fill-mask"] == least


def test_masks_do_not_depend_on_the_packing(collator: Collator, plan: Plan) -> None:
    """They follow from the seed, the epoch and the example."""
    rows = some_rows(plan, 12)
    together = collator(rows).tokens.ids
    assert torch.equal(collator(rows).tokens.ids, together)
    for line, row in enumerate(rows):
        alone = [collator([[example]]) for example in row]
        ids = [one.tokens.ids[0, : one.num_tokens] for one in alone]
        assert torch.equal(torch.cat(ids), together[line, : sum(map(len, ids))])
    assert not torch.equal(replace(collator, seed=4)(rows).tokens.ids, together)
    later = [[example._replace(epoch=1) for example in row] for row in rows]
    batch = collator(later)
    assert torch.equal(restored(batch), restored(collator(rows)))
    assert not torch.equal(batch.tokens.ids, together)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(TrainingError, match="10 rows do not divide into batches of 2 in 2 proc"):
        Slicing(num_rows=10, rows_a_batch=2, world_size=2)
