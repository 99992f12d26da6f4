"""The recipes of pretraining are what papers say; a job divides its steps among masks and pairs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from albert_serve.config import AlbertConfig, preset
from training.commands.pretrain import PretrainConfig
from training.data.masking import NgramMasking
from training.data.shards import Shards
from training.errors import RunError
from training.loop.distributed import World
from training.pretraining.config import Start
from training.pretraining.job import PretrainingJob
from training.pretraining.recipes import RECIPES, scaled_lr

PAPER = RECIPES["paper"]


def test_the_paper_s_numbers() -> None:
    """Lan et al. 2019, and the defaults of google-research/ALBERT where the paper has none."""
    assert asdict(PAPER) == {
        "length": 512,  # section 4.1: the maximum input length
        "batch_size": 4096,  # section 4.1
        "num_steps": 125_000,  # section 4.1
        "optimizer": "lamb",  # section 4.1
        "lr": 0.00176,  # section 4.1
        "adamw_lr": 0.00176,  # of no effect
        "pooled_factor": 1.0,  # one rate for all
        "weight_decay": 0.01,  # optimization.py, create_optimizer
        "schedule": "linear",  # optimization.py, polynomial decay of power 1 to 0
        "warmup": 3125 / 125_000,  # run_pretraining.py, num_warmup_steps
        "decay": 1.0,  # of no effect
        "mask_rate": 0.15,  # create_pretraining_data.py, masked_lm_prob
        "sentence_task": "sop",  # section 3.1
        "sentence_weight": 1.0,  # run_pretraining.py: the sum of both losses
        "short_rate": 0.1,  # section 4.1: 10 % of the inputs are shorter
        "clip_norm": 1.0,  # optimization.py
        "start": "random",  # modeling.py: truncated normal of 0.02
        "dropout": "v1",  # Table 1's models; section 4.8 takes it away later
        "seed": 0,
        "order_share": 0.0,  # not the paper's: sentence order stands in the masked rows
        "order_length": None,
        "order_batch_size": None,
        "order_sentences": 2,
    }
    assert NgramMasking(word_starts=np.zeros(1, bool)).max_words == 3  # section 4.1


def test_the_paper_s_rate_over_the_run() -> None:
    """It falls from step 0 on, so that it is at most 0.975 of the peak (optimization.py)."""
    schedule = PAPER.rate_schedule
    rates = [PAPER.lr * schedule.factor(step / 125_000) for step in (0, 1, 3124, 3125, 62_500)]
    expected = [0.0, 0.00176 / 3125, 0.00176 * 3124 / 3125, 0.001716, 0.00088]
    assert rates == pytest.approx(expected)
    assert schedule.factor(1.0) == 0


def test_lamb_s_rate_goes_with_the_root_of_the_batch() -> None:
    """You et al. 2019, section 4: so that the variance of a step stays alike."""
    rates = [scaled_lr(PAPER, batch_size) for batch_size in (4096, 1024, 16384)]
    assert rates == pytest.approx([0.00176, 0.00088, 0.00352])
    assert scaled_lr(replace(PAPER, optimizer="adamw"), 1024) == PAPER.lr


def test_dropout_of_the_released_models() -> None:
    """v1 has it everywhere but in xxlarge, v2 nowhere (README of google-research/ALBERT)."""
    sizes = [preset(name) for name in ("base", "large", "xlarge", "xxlarge")]
    assert [PAPER.dropout_of(each) for each in sizes] == [0.1, 0.1, 0.1, 0.0]
    assert {replace(PAPER, dropout="v2").dropout_of(each) for each in sizes} == {0.0}


JOB_SIZES = AlbertConfig(
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
        architecture=JOB_SIZES,
        start=Start(folder=None, name=None, tokenizer=vocab_dir),
        shards=shards,
        world=world or World(),
        precision="auto",
        compiles=False,
    )


@pytest.mark.parametrize(
    ("micro_batch_size", "rows"),
    [(None, 16), (64, 16), (8, 2), (4, 1), (1, 1)],
)
def test_pairs_take_no_more_tokens_a_pass_than_masked_rows(
    shards: Shards, vocab_dir: Path, micro_batch_size: int | None, rows: int
) -> None:
    """A row of pairs is 128 tokens in both orders, as 4 rows of 32."""
    job = make_job(shards, vocab_dir, micro_batch_size=micro_batch_size)
    slicing = job.pair_stream().slicing
    assert (slicing.num_rows, slicing.rows_a_batch) == (16, rows)


def test_a_count_that_does_not_divide_is_refused(shards: Shards, vocab_dir: Path) -> None:
    job = make_job(shards, vocab_dir, World(size=8), order_batch_size=4)
    with pytest.raises(RunError, match="--order-batch-size 4 is no multiple of the 8 processes"):
        job.pair_stream()


def test_masked_steps_leave_the_head_of_sentence_order_as_it_is(
    shards: Shards, vocab_dir: Path
) -> None:
    """Nor do its weights decay in them, or go on by moments of the steps on pairs."""
    options: dict[str, Any] = {"warmup": 0.0, "schedule": "wsd", "optimizer": "adamw"}
    job = make_job(shards, vocab_dir, batch_size=8, order_share=0.25, **options)
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
    assert run.num_steps["pretraining"] > run.num_steps["sentence-order"]
