"""Rows contain every example of an epoch once, and batches have the format of BERT's inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import TINY, corpora, make_part, make_shards
from training.data import packing
from training.data.batch import PretrainBatch
from training.data.collate import Collator, Slicing, load_steps
from training.data.examples import IGNORED, Example, ExampleSettings, SentenceTask, build_examples
from training.data.masking import NgramMasking, word_starts
from training.data.packing import MAX_IN_ROW, Plan, Position, best_row_length, pack
from training.data.shards import Shards
from training.errors import TrainingError
from training.model.albert import Packing

LENGTH = 32
# Parts, documents and the lengths of their sentences.
documents = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=4)
parts = st.lists(documents, min_size=1, max_size=5)
windows = st.sampled_from([1, 60, 200, 1 << 26])


def make_plan(
    documents: Sequence[Sequence[Sequence[int]]], *, seed: int = 0, task: SentenceTask = "sop"
) -> Plan:
    """Make a plan over parts, given the documents of each part."""
    return Plan(
        shards=make_shards(*map(make_part, documents)),
        settings=ExampleSettings(length=LENGTH, sentence_task=task),
        seed=seed,
    )


def all_examples(plan: Plan, epoch: int) -> Iterator[Example]:
    """Build every example of an epoch, without packing."""
    for number, part in enumerate(plan.shards.parts):
        examples = build_examples(part, plan.settings, seed=plan.seed, epoch=epoch, number=number)
        pairs = zip(examples.bounds.tolist(), examples.labels, strict=True)
        for index, (bounds, label) in enumerate(pairs):
            yield Example(number, epoch, index, tuple(bounds), label)


@settings(deadline=None, max_examples=25)
@given(parts, st.integers(0, 2**40), windows, st.sampled_from(["sop", "nsp", "none"]))
def test_each_example_of_an_epoch_is_in_one_row_without_overflow(
    documents: list[list[list[int]]], seed: int, window: int, task: SentenceTask
) -> None:
    plan = make_plan(documents, seed=seed, task=task)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_WINDOW_TOKENS", window)
        steps, parts = plan.steps(1, Position()), plan.shards.parts
        for epoch in range(3):
            rows = list(plan.epoch(epoch))
            assert [step.rows[0] for step in islice(steps, len(rows))] == rows
            assert Counter(chain(*rows)) == Counter(all_examples(plan, epoch))
            sizes = [
                sum(len(example.tokens(parts[example.part])[0]) for example in row) for row in rows
            ]
            assert 0 < min(sizes) <= max(sizes) <= LENGTH


@settings(deadline=None, max_examples=25)
@given(parts, st.integers(1, 9), windows, st.integers(0, 99), st.data())
def test_steps_continue_from_any_position(
    documents: list[list[list[int]]], num_rows: int, window: int, seed: int, data: st.DataObject
) -> None:
    """Steps extend over several windows and epochs. Their rows do not depend on the step size."""
    plan = make_plan(documents, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_WINDOW_TOKENS", window)
        steps = list(islice(plan.steps(num_rows, Position()), 8))
        for number in data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=2)):
            rest = plan.steps(num_rows, steps[number].next)
            assert list(islice(rest, 7 - number)) == steps[number + 1 :]
        single_rows = [step.rows[0] for step in islice(plan.steps(1, Position()), 8 * num_rows)]
    assert [row for step in steps for row in step.rows] == single_rows


def test_an_example_goes_into_the_row_that_it_leaves_with_the_least_room() -> None:
    """The longest examples are first. A row has at most 16 sequences, with its padding."""
    assert pack(np.array([3, 10, 4, 6, 5, 1]), 10).tolist() == [2, 0, 1, 1, 2, 2]
    assert np.bincount(pack(np.ones(31, np.int64), 40)).tolist() == [15, 15, 1]


@pytest.mark.parametrize(("hidden_size", "length"), [(10, 64), (11, 128)])
def test_the_row_length_is_the_multiple_of_64_with_the_fewest_operations(
    hidden_size: int, length: int
) -> None:
    config = replace(TINY, hidden_size=hidden_size, num_heads=1, max_positions=128)
    assert best_row_length([np.full(3, 40)], longest=40, config=config) == length


VOCAB_SIZE = 800
EVERY_TOKEN = NgramMasking(word_starts=np.ones(VOCAB_SIZE, bool))


def first_rows(plan: Plan, num_rows: int) -> list[list[Example]]:
    return next(plan.steps(num_rows, Position())).rows


def unmasked_ids(batch: PretrainBatch) -> Tensor:
    """Return the flattened ids as they were before masking."""
    ids = batch.tokens.ids.flatten().clone()
    ids[batch.rows[: batch.counts["fill-mask"]]] = batch.targets[: batch.counts["fill-mask"]]
    return ids


def bert_inputs(example: Example, shards: Shards) -> tuple[list[int], list[int]]:
    """Return the ids and types of [CLS] A [SEP] B [SEP], or of [CLS] A [SEP]."""
    tokens = shards.parts[example.part].tokens
    a, b, c, d = example.bounds
    ids, types = [2, *tokens[a:b].tolist(), 3], [0] * (b - a + 2)
    if c < d:
        ids, types = [*ids, *tokens[c:d].tolist(), 3], types + [1] * (d - c + 1)
    return ids, types


def assert_is_bert(batch: PretrainBatch, rows: Sequence[Sequence[Example]], shards: Shards) -> None:
    """Compare every tensor of a batch with its rows of examples."""
    tokens: list[tuple[int, int, int, int]] = []  # the id, type, position and sequence of each
    firsts: list[int] = []
    for line, row in enumerate(rows):
        for number, example in enumerate(row):
            firsts.append(len(tokens))
            ids, types = bert_inputs(example, shards)
            tokens += zip(ids, types, range(len(ids)), [number] * len(ids), strict=True)
        tokens += [(0, 0, 0, -1)] * ((line + 1) * LENGTH - len(tokens))
    packing = batch.tokens.packing
    assert packing is not None
    columns = [unmasked_ids(batch), batch.tokens.types, packing.positions, packing.sequences]
    table = torch.stack([column.flatten() for column in columns], dim=1)
    assert table.tolist() == list(map(list, tokens))
    labels = [example.label for row in rows for example in row]
    assert_is_padded(batch.firsts, firsts, 0)
    assert_is_padded(batch.labels, labels, IGNORED)
    assert batch.num_tokens == sum(sequence >= 0 for *_, sequence in tokens)
    assert batch.counts["sentence-order"] == sum(label != IGNORED for label in labels)
    assert batch.tokens.lengths is None
    assert_bounds_cover(packing)


def assert_bounds_cover(packing: Packing) -> None:
    """Check the bounds: each sequence, and the padding of each row, is one separate span."""
    shape = packing.sequences.shape
    bounds = packing.bounds.tolist()
    assert packing.bounds.dtype == torch.int32
    assert len(bounds) == MAX_IN_ROW * shape[0] + 1
    assert (bounds[0], bounds[-1]) == (0, shape.numel())
    assert bounds == sorted(bounds)
    row = torch.arange(shape[0])[:, None].expand(shape)
    keys: list[int] = (row * (shape[1] + 1) + packing.sequences).flatten().tolist()
    spans = [set(keys[begin:end]) for begin, end in pairwise(bounds) if begin < end]
    assert all(len(span) == 1 for span in spans)
    assert len(set.union(*spans)) == len(spans) == len(set(keys))


def assert_is_padded(values: Tensor, expected: list[int], filler: int) -> None:
    """Check the values, and that fillers follow to the next multiple of 64."""
    num_padded = -len(expected) % 64
    assert values.dtype == torch.int64
    assert values.tolist() == expected + [filler] * num_padded


@pytest.mark.parametrize("task", ["sop", "nsp", "none"])
@settings(deadline=None, max_examples=25)
@given(corpora, st.integers(1, 12), st.integers(0, 2**40))
def test_batches_of_any_corpus_have_the_format_of_bert(
    task: SentenceTask, documents: list[list[int]], num_rows: int, seed: int
) -> None:
    shards = make_shards(make_part(documents, VOCAB_SIZE))
    example_settings = ExampleSettings(length=LENGTH, sentence_task=task)
    rows = first_rows(Plan(shards=shards, settings=example_settings, seed=seed), num_rows)
    batch = Collator(shards=shards, masking=EVERY_TOKEN, length=LENGTH, seed=seed)(rows)
    assert_is_bert(batch, rows, shards)
    num_masked = batch.counts["fill-mask"]
    assert_is_padded(batch.rows, batch.rows[:num_masked].tolist(), 0)
    assert_is_padded(batch.targets, batch.targets[:num_masked].tolist(), IGNORED)
    # In each sequence, 15 % of the tokens are masked, and at least one.
    sizes = [len(bert_inputs(example, shards)[0]) for example in chain(*rows)]
    assert num_masked == sum(max(1, round(0.15 * size)) for size in sizes)


def test_masks_are_determined_by_the_seed_the_epoch_and_the_example(
    shards: Shards, tokenizer: AlbertTokenizer
) -> None:
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    collator = Collator(shards=shards, masking=masking, length=LENGTH, seed=3)
    rows = first_rows(Plan(shards=shards, settings=ExampleSettings(length=LENGTH), seed=3), 12)
    batch = collator(rows)
    for ids, row in zip(batch.tokens.ids, rows, strict=True):
        single_batches = [collator([[example]]) for example in row]
        single_ids = torch.cat([one.tokens.ids[0, : one.num_tokens] for one in single_batches])
        assert torch.equal(single_ids, ids[: len(single_ids)])
    next_epoch = [[example._replace(epoch=1) for example in row] for row in rows]
    for other_batch in (replace(collator, seed=4)(rows), collator(next_epoch)):
        assert torch.equal(unmasked_ids(other_batch), unmasked_ids(batch))
        assert not torch.equal(other_batch.tokens.ids, batch.tokens.ids)


def test_processes_take_the_micro_batches_of_a_step_in_turn() -> None:
    plan = make_plan([[[6, 7], [30], [4, 9]]] * 4)

    def collate(rows: Sequence[Sequence[Example]]) -> Any:
        return list(rows)

    def steps(**slicing: int) -> list[Any]:
        slices = Slicing(num_rows=8, rows_per_batch=2, **slicing)
        return list(islice(load_steps(plan, collate, slices, Position(), num_workers=0), 3))

    ranks = [steps(rank=rank, world_size=2) for rank in range(2)]
    for (batches, position), first, second in zip(steps(), *ranks, strict=True):
        assert len(batches) == 4
        assert first == (batches[::2], position)
        assert second == (batches[1::2], position)
    with pytest.raises(TrainingError, match="10 rows do not divide into batches of 2 in 2 proc"):
        Slicing(num_rows=10, rows_per_batch=2, world_size=2)
