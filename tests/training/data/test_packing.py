"""Rows hold every example of an epoch once and little padding; a batch of them is BERT's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import corpora, make_part, make_shards
from training.data import packing
from training.data.batch import PretrainBatch
from training.data.collate import Collator, Slicing, load_steps
from training.data.examples import IGNORED, Example, ExampleSettings, SentenceTask, build_examples
from training.data.masking import NgramMasking, word_starts
from training.data.packing import MAX_IN_ROW, Plan, Position
from training.data.shards import Shards
from training.errors import TrainingError
from training.model.albert import Packing

LENGTH = 32
# Parts of documents of a few sentences each.
documents = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=4)
parts = st.lists(documents, min_size=1, max_size=5)
windows = st.sampled_from([1, 60, 200, 1 << 26])


def make_plan(
    documents: Sequence[Sequence[Sequence[int]]], *, seed: int = 0, task: SentenceTask = "sop"
) -> Plan:
    """A plan over parts of such documents."""
    return Plan(
        shards=make_shards(*map(make_part, documents)),
        settings=ExampleSettings(length=LENGTH, sentence_task=task),
        seed=seed,
    )


def all_examples(plan: Plan, epoch: int) -> list[Example]:
    """Every example of an epoch, by the definition alone."""
    return [
        Example(number, epoch, index, tuple(bounds), label)
        for number, part in enumerate(plan.shards.parts)
        for built in [
            build_examples(part, plan.settings, seed=plan.seed, epoch=epoch, number=number)
        ]
        for index, (bounds, label) in enumerate(
            zip(built.bounds.tolist(), built.labels, strict=True)
        )
    ]


@settings(deadline=None, max_examples=25)
@given(parts, st.integers(0, 2**40), windows, st.sampled_from(["sop", "nsp", "none"]))
def test_an_epoch_has_every_example_in_one_row(
    documents: list[list[list[int]]], seed: int, window: int, task: SentenceTask
) -> None:
    plan = make_plan(documents, seed=seed, task=task)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_WINDOW_TOKENS", window)
        stepped = plan.steps(1, Position())
        for epoch in range(3):
            rows = list(plan.epoch(epoch))
            assert [step.rows[0] for step in islice(stepped, len(rows))] == rows
            assert Counter(each for row in rows for each in row) == Counter(
                all_examples(plan, epoch)
            )
            parts = plan.shards.parts
            used = [sum(len(each.tokens(parts[each.part])[0]) for each in row) for row in rows]
            assert 0 < min(used) <= max(used) <= LENGTH


@settings(deadline=None, max_examples=25)
@given(parts, st.integers(1, 9), windows, st.integers(0, 99), st.data())
def test_steps_go_on_from_any_position(
    documents: list[list[list[int]]], num_rows: int, window: int, seed: int, data: st.DataObject
) -> None:
    """Over windows and epochs, which steps straddle; also where they were cut otherwise before."""
    plan = make_plan(documents, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_WINDOW_TOKENS", window)
        whole = list(islice(plan.steps(num_rows, Position()), 8))
        for at in data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=2)):
            rest = plan.steps(num_rows, whole[at].next)
            assert list(islice(rest, 7 - at)) == whole[at + 1 :]
        one_by_one = plan.steps(1, Position())
        rows = [next(one_by_one).rows[0] for _ in range(8 * num_rows)]
    assert [row for step in whole for row in step.rows] == rows


VOCAB_SIZE = 800
EVERY_TOKEN = NgramMasking(word_starts=np.ones(VOCAB_SIZE, bool))


def some_rows(plan: Plan, num_rows: int) -> list[list[Example]]:
    return next(plan.steps(num_rows, Position())).rows


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
    tokens: list[tuple[int, int, int, int]] = []  # id, type, position and sequence
    firsts: list[int] = []
    for line, row in enumerate(rows):
        for number, example in enumerate(row):
            firsts.append(len(tokens))
            ids, types = as_bert(example, shards)
            columns = (ids, types, range(len(ids)), [number] * len(ids))
            tokens += zip(*columns, strict=True)
        tokens += [(0, 0, 0, -1)] * ((line + 1) * LENGTH - len(tokens))
    packing = batch.tokens.packing
    assert packing is not None
    others = (batch.tokens.types, packing.positions, packing.sequences)
    flat = [restored(batch), *(column.flatten() for column in others)]
    assert torch.stack(flat, dim=1).tolist() == list(map(list, tokens))
    labels = [example.label for row in rows for example in row]
    assert_is_padded(batch.firsts, firsts, 0)
    assert_is_padded(batch.labels, labels, IGNORED)
    assert batch.num_tokens == sum(sequence >= 0 for *_, sequence in tokens)
    assert batch.counts["sentence-order"] == sum(label != IGNORED for label in labels)
    assert batch.tokens.lengths is None
    assert_bounds_cover(packing)


def assert_bounds_cover(packing: Packing) -> None:
    """As cu_seqlens: every sequence and all padding of a row is one span of its own."""
    shape = packing.sequences.shape
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


def assert_is_padded(values: Tensor, expected: list[int], filler: int) -> None:
    """The values, then fillers to the next multiple of 64."""
    num_padded = -len(expected) % 64
    assert values.dtype == torch.int64
    assert values.tolist() == expected + [filler] * num_padded


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
    num_masked = batch.counts["fill-mask"]
    assert_is_padded(batch.rows, batch.rows[:num_masked].tolist(), 0)
    assert_is_padded(batch.targets, batch.targets[:num_masked].tolist(), IGNORED)
    # Each sequence is masked by itself: at least one token, 15 % of them at most.
    sizes = [len(as_bert(example, shards)[0]) for row in rows for example in row]
    assert num_masked == sum(max(1, round(0.15 * size)) for size in sizes)


def test_masks_follow_from_the_seed_the_epoch_and_the_example(
    shards: Shards, tokenizer: AlbertTokenizer
) -> None:
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    collator = Collator(shards=shards, masking=masking, length=LENGTH, seed=3)
    rows = some_rows(Plan(shards=shards, settings=ExampleSettings(length=LENGTH), seed=3), 12)
    batch = collator(rows)
    together = batch.tokens.ids
    for line, row in enumerate(rows):
        alone = [collator([[example]]) for example in row]
        ids = [one.tokens.ids[0, : one.num_tokens] for one in alone]
        assert torch.equal(torch.cat(ids), together[line, : sum(map(len, ids))])
    later = [[example._replace(epoch=1) for example in row] for row in rows]
    for other in (replace(collator, seed=4)(rows), collator(later)):
        assert torch.equal(restored(other), restored(batch))
        assert not torch.equal(other.tokens.ids, together)


def test_processes_take_turns_at_the_micro_batches_of_a_step() -> None:
    plan = make_plan([[[6, 7], [30], [4, 9]]] * 4)

    def collate(rows: Sequence[Sequence[Example]]) -> Any:
        return list(rows)

    def steps(**slicing: int) -> list[Any]:
        slices = Slicing(num_rows=8, rows_per_batch=2, **slicing)
        return list(islice(load_steps(plan, collate, slices, Position(), num_workers=0), 3))

    whole = steps()
    ranks = [steps(rank=rank, world_size=2) for rank in range(2)]
    for (batches, position), *parts in zip(whole, *ranks, strict=True):
        assert len(batches) == 4
        assert [part for part, _ in parts] == [batches[::2], batches[1::2]]
        assert {end for _, end in parts} == {position}
    with pytest.raises(TrainingError, match="10 rows do not divide into batches of 2 in 2 proc"):
        Slicing(num_rows=10, rows_per_batch=2, world_size=2)
