"""A job with steps on pairs in both orders: how they are divided, and what they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from albert_serve.config import AlbertConfig
from training.commands.pretrain import PretrainConfig
from training.data.shards import Shards
from training.errors import RunError
from training.loop.distributed import World
from training.pretraining.config import Start
from training.pretraining.job import PretrainingJob
from training.pretraining.recipes import RECIPES

SIZES = AlbertConfig(
    vocab_size=800,
    embedding_size=16,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    max_positions=64,
)


def make_job(
    shards: Shards, vocab_dir: Path, world: World | None = None, **values: Any
) -> PretrainingJob:
    config = PretrainConfig(
        output=Path("unused"),
        shards=Path("open"),
        tokenizer=vocab_dir,
        steps=32,
        workers=0,
        **{"length": 32, "batch_size": 64, "order_share": 0.5, "device": "cpu", **values},
    )
    return PretrainingJob(
        config=config,
        recipe=config.changed(RECIPES["small"]),
        architecture=SIZES,
        start=Start(folder=None, name=None, tokenizer=vocab_dir),
        shards=shards,
        world=world or World(),
        precision="auto",
        compiles=False,
    )


@pytest.mark.parametrize(
    ("micro_batch_size", "rows"),
    [(None, 16), (64, 16), (16, 4), (8, 2), (4, 1), (1, 1)],
)
def test_pairs_take_no_more_tokens_a_pass_than_masked_rows(
    shards: Shards, vocab_dir: Path, micro_batch_size: int | None, rows: int
) -> None:
    """A row of pairs is 128 tokens in both orders, as 4 rows of 32."""
    job = make_job(shards, vocab_dir, micro_batch_size=micro_batch_size)
    slicing = job.pair_stream().slicing
    assert (slicing.num_rows, slicing.rows_a_batch) == (16, rows)


@pytest.mark.parametrize(("num_processes", "rows"), [(1, 4), (3, 3), (8, 8)])
def test_pairs_that_nobody_counted_divide_among_the_processes(
    shards: Shards, vocab_dir: Path, num_processes: int, rows: int
) -> None:
    world = World(rank=num_processes - 1, size=num_processes)
    job = make_job(shards, vocab_dir, world, batch_size=16)
    assert job.pair_stream().slicing.num_rows == rows


def test_a_count_that_does_not_divide_is_refused(shards: Shards, vocab_dir: Path) -> None:
    job = make_job(shards, vocab_dir, World(size=8), order_batch_size=4)
    with pytest.raises(RunError, match="--order-batch-size 4 is no multiple of the 8 processes"):
        job.pair_stream()


def test_masked_steps_leave_the_head_of_sentence_order_as_it_is(
    shards: Shards, vocab_dir: Path
) -> None:
    """Nor do its weights decay in them, or go on by moments of the steps on pairs."""
    job = make_job(shards, vocab_dir, batch_size=8, warmup=0.0, schedule="wsd", optimizer="adamw")
    run = job.build()
    parts = (run.model.heads["sentence-order"], run.model.pooler)
    mine = [each for part in parts if part is not None for each in part.parameters()]
    has_changed = {"pretraining": set[bool](), "sentence-order": set[bool]()}
    for number in range(12):
        before, steps = [each.detach().clone() for each in mine], run.num_steps.copy()
        run.step(done=number / 32)
        (stream,) = run.num_steps - steps
        has_changed[stream].add(not all(map(torch.equal, before, mine)))
    assert has_changed == {"pretraining": {False}, "sentence-order": {True}}
