"""Task streams yield each example once per epoch, in bounded batches, and resume from any state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import TINY, make_part, make_shards, our_model
from training.data.batch import TokenisedExample
from training.data.collate import Collator, Slicing
from training.data.corpus import CorpusError
from training.data.examples import ExampleSettings
from training.data.masking import NgramMasking
from training.data.packing import Plan
from training.data.streams import (
    UNDIVIDED,
    Division,
    ExampleStream,
    PackedStream,
    TaskStream,
    example_stream,
    shuffled_batches,
)
from training.errors import TrainingError
from training.losses import LossFunction, Objective
from training.model.heads import AlbertForTasks
from training.tasks.classification.files import LabelledText, labelled_examples
from training.tasks.classification.loss import classification_loss
from training.tasks.pretraining.loss import pretrain_loss

CPU = torch.device("cpu")
TASK = "text-classification"
LOSSES: dict[str, LossFunction] = {"pretraining": pretrain_loss, TASK: classification_loss}
EXAMPLES = [
    TokenisedExample(ids=[2, *range(5, 5 + size), 3], types=[0] * (size + 2), target=size % 3)
    for size in range(1, 13)
]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 80), st.integers(1, 120), st.integers(0, 9))
def test_each_epoch_has_every_example_once_in_batches_of_similar_size(
    num_examples: int, batch_size: int, seed: int
) -> None:
    batches = shuffled_batches(num_examples, batch_size, seed)
    for _ in range(3):
        epoch = list(islice(batches, -(-num_examples // batch_size)))
        assert sorted(chain(*epoch)) == list(range(num_examples))
        sizes = [len(batch) for batch in epoch]
        assert max(sizes) <= min(batch_size, min(sizes) + 1)


def test_every_division_of_a_step_has_the_same_loss() -> None:
    """Steps are divided by length, into micro-batches and among processes."""
    sizes = (62, 42, 35, 27, 19, 11, 5, 4) * 12
    examples = [
        TokenisedExample(ids=[2, *[7] * (size - 2), 3], types=[0] * size, target=size % 2)
        for size in sizes
    ]
    config = replace(TINY, max_positions=64)
    objective = Objective(our_model(config, (TASK,)), CPU, LOSSES)

    def passes(**division: Any) -> tuple[list[tuple[int, int]], float]:
        """Return the number of examples and the row length of each pass, and the total loss."""
        stream = example_stream(
            TASK, examples, config, batch_size=96, seed=0, division=Division(**division)
        )
        batches = stream.step()
        sums = [objective(batch)[TASK] for batch in batches]
        lengths = [batch.tokens.ids.shape[1] for batch in batches]
        counts = [batch_sums.count for batch_sums in sums]
        total = sum(batch_sums.loss.item() for batch_sums in sums)
        return list(zip(counts, lengths, strict=True)), total

    shapes, loss = passes()
    assert shapes == [(96, 64)]
    shapes, loss_by_length = passes(by_length=True)
    # 2,460 tokens make two passes of at least 1,024. The 24 longest examples have 1,248.
    assert shapes == [(24, 64), (72, 48)]
    assert loss_by_length == pytest.approx(loss, rel=1e-5)
    assert [passes(rank=rank, world_size=3)[0] for rank in range(3)] == [[(32, 64)]] * 3
    ranks = [passes(micro_batch_size=10, rank=rank, world_size=3) for rank in range(3)]
    counts = [[count for count, _ in shapes] for shapes, _ in ranks]
    assert counts == [[10, 10, 9, 9], [10, 10, 9], [10, 10, 9]]
    assert sum(rank_loss for _, rank_loss in ranks) == pytest.approx(loss, rel=1e-5)


def test_each_process_needs_an_example_in_each_step() -> None:
    """Twelve examples in steps of at most five have four in the smallest step."""
    text_stream(division=Division(world_size=4))
    with pytest.raises(TrainingError, match="has 4 of 12 examples in a step, fewer than the 5 pr"):
        text_stream(division=Division(world_size=5))
    with pytest.raises(TrainingError, match="text-classification has no examples to train on"):
        ExampleStream(task=TASK, examples=[], batch_size=1, row_length=16, seed=0)


def text_stream(*, seed: int = 1, division: Division = UNDIVIDED) -> TaskStream:
    return example_stream(TASK, EXAMPLES, TINY, batch_size=5, seed=seed, division=division)


def test_long_texts_are_truncated_and_counted(tokenizer: AlbertTokenizer) -> None:
    long, pair = tokenizer.encode("the end the end the the the"), tokenizer.encode("the", "end")
    assert len(long.ids) == 13
    texts = [
        LabelledText(
            text="the end the end the the the", pair=None, label=0, location="a.csv, row 7"
        ),
        LabelledText(text="the", pair="end", label=1),
    ]
    examples, num_truncated = labelled_examples(texts, tokenizer, length=12, truncation=True)
    assert (examples[0].ids, examples[0].target) == ([*long.ids[:11], long.ids[-1]], 0)
    assert (examples[1].ids, examples[1].types, examples[1].target) == (pair.ids, pair.types, 1)
    assert num_truncated == 1
    with pytest.raises(CorpusError, match="row 7: The text has more than 12 tokens"):
        labelled_examples(texts, tokenizer, length=12, truncation=False)


def pretrain_stream(*, seed: int = 0) -> PackedStream:
    """Make a stream of rows of 16 tokens from two parts.

    Each document has two sentences. One sentence fills half a row, and two fill a row.
    """
    documents = [[6, 7], [3, 2], [4, 9], [5, 5], [6, 1]] * 4
    shards = make_shards(*[make_part(documents, TINY.vocab_size)] * 2)
    masking = NgramMasking(word_starts=np.ones(50, bool))
    return PackedStream(
        plan=Plan(shards=shards, settings=ExampleSettings(length=16), seed=seed),
        collate=Collator(shards=shards, masking=masking, length=16, seed=seed),
        slicing=Slicing(num_rows=4, rows_per_batch=4),
    )


def results(stream: TaskStream, model: AlbertForTasks, num_steps: int) -> list[dict[str, float]]:
    """Return the losses and the number of tokens of each pass of the next steps."""
    objective = Objective(model, CPU, LOSSES)
    return [
        {task: sums.loss.item() for task, sums in objective(batch).items()}
        | {"tokens": batch.num_tokens}
        for _ in range(num_steps)
        for batch in stream.step()
    ]


@pytest.mark.parametrize("make", [pretrain_stream, text_stream])
@pytest.mark.parametrize("num_steps", [0, 1, 13])
def test_a_stream_resumes_from_its_state(make: Callable[..., TaskStream], num_steps: int) -> None:
    """The steps extend over several epochs. All steps differ."""
    model = our_model(TINY, ("fill-mask", "sentence-order", TASK))
    first, second = make(), make()
    start = results(first, model, num_steps)
    state = first.state()
    rest = results(first, model, 12)
    assert first.state()[0] > 0
    assert len({losses[first.tasks[0]] for losses in start + rest}) == num_steps + 12
    second.restore(state)
    assert second.state() == state
    assert results(second, model, 12) == rest
    assert second.state() == first.state()
    first.restore(state)  # backwards
    assert results(first, model, 12) == rest
    assert results(make(seed=2), model, 1) != results(make(), model, 1)
