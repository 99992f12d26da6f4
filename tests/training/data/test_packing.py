"""Rows hold every example of an epoch once and next to no padding, from any position on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.support import make_part, make_shards
from training.data import packing
from training.data.examples import Example, ExampleSettings, SentenceTask, build_examples
from training.data.packing import MAX_IN_ROW, Plan, PlannedStep, Position, pack
from training.errors import TrainingError

LENGTH = 32
# Parts of documents of a few sentences each.
parts = st.lists(
    st.lists(
        st.lists(st.integers(1, 40), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=5,
)
windows = st.sampled_from([1, 60, 200, 1 << 26])


def make_plan(
    documents: Sequence[Sequence[Sequence[int]]],
    *,
    seed: int = 0,
    task: SentenceTask = "sop",
    length: int = LENGTH,
) -> Plan:
    """A plan over parts of such documents."""
    return Plan(
        shards=make_shards(*map(make_part, documents)),
        settings=ExampleSettings(length=length, sentence_task=task),
        seed=seed,
    )


def all_examples(plan: Plan, epoch: int) -> list[Example]:
    """Every example of an epoch, by the definition alone."""
    examples: list[Example] = []
    for number, part in enumerate(plan.shards.parts):
        built = build_examples(part, plan.settings, seed=plan.seed, epoch=epoch, number=number)
        examples += [
            Example(number, epoch, index, tuple(bounds), label)
            for index, (bounds, label) in enumerate(
                zip(built.bounds.tolist(), built.labels.tolist(), strict=True)
            )
        ]
    return examples


def num_tokens(plan: Plan, row: Sequence[Example]) -> int:
    return sum(len(example.tokens(plan.shards.parts[example.part])[0]) for example in row)


def take(steps: Iterator[PlannedStep], num_steps: int) -> list[PlannedStep]:
    return list(islice(steps, num_steps))


@settings(deadline=None, max_examples=100)
@given(st.integers(8, 64), st.data())
def test_no_row_is_too_full(length: int, data: st.DataObject) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(3, length), min_size=1, max_size=120)))
    row_of = pack(sizes, length)
    assert row_of.shape == sizes.shape
    used = np.bincount(row_of, sizes)
    assert (used > 0).all()  # no row is left out
    assert used.max() <= length
    num_sequences = np.bincount(row_of) + (used < length)
    assert num_sequences.max() <= MAX_IN_ROW
    # Two half-empty rows would be one, but for those of as many sequences as a row may have.
    is_open = np.bincount(row_of) < MAX_IN_ROW - 1
    assert (is_open & (used <= length / 2)).sum() <= 1


def test_rows_of_short_examples_are_within_the_limit_of_sequences() -> None:
    row_of = pack(np.full(5 * MAX_IN_ROW, 3), 4 * MAX_IN_ROW)
    assert np.bincount(row_of).max() == MAX_IN_ROW - 1  # the rest is padding, and one more


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
            for row in rows:
                used = num_tokens(plan, row)
                assert 0 < used <= LENGTH
                assert len(row) + (used < LENGTH) <= MAX_IN_ROW


@settings(deadline=None, max_examples=25)
@given(
    documents=parts,
    num_rows=st.integers(1, 9),
    window=windows,
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_steps_go_on_from_any_position(
    documents: list[list[list[int]]], num_rows: int, window: int, seed: int, data: st.DataObject
) -> None:
    """Over windows and epochs, which steps straddle; also where they were cut otherwise before."""
    plan = make_plan(documents, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_WINDOW_TOKENS", window)
        whole = take(plan.steps(num_rows, Position()), 8)
        for at in data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=2)):
            assert take(plan.steps(num_rows, whole[at].next), 7 - at) == whole[at + 1 :]
        one_by_one = plan.steps(1, Position())
        rows = [next(one_by_one).rows[0] for _ in range(8 * num_rows)]
    assert [row for step in whole for row in step.rows] == rows


def test_no_two_draws_are_of_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three epochs: order of parts, examples of a part, rows of a window, masks.

    A generator of fewer numbers is that of the same ones and zeros.
    """
    keys: list[Sequence[int]] = []
    make = np.random.default_rng

    def record(key: Sequence[int]) -> np.random.Generator:
        keys.append(key)
        return make(key)

    monkeypatch.setattr(packing, "_WINDOW_TOKENS", 1)
    monkeypatch.setattr(np.random, "default_rng", record)
    plan = make_plan([[[6, 7], [3, 2]]] * 3)
    examples = [each for epoch in range(3) for row in plan.epoch(epoch) for each in row]
    for example in examples:
        example.mask_rng(plan.seed)
    states = [tuple(np.random.SeedSequence(key).generate_state(4)) for key in keys]
    assert len(states) == 3 + 3 * 3 + 3 * 3 + len(examples)
    assert len(set(states)) == len(states)


def test_no_example_at_all() -> None:
    for shards in (make_shards(), make_shards(make_part([])), make_shards(*[make_part([])] * 2)):
        plan = Plan(shards=shards, settings=ExampleSettings(length=32), seed=0)
        with pytest.raises(TrainingError, match="the corpus gives no example; give more text"):
            next(plan.steps(4, Position()))
        with pytest.raises(TrainingError, match="the corpus gives no example; give more text"):
            next(plan.epoch(0))
