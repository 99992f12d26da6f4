"""A child process that pretrains with this package: the steps of `training.pretrain`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.harness.channel import Channel
from benchmarks.pretraining import jobs
from benchmarks.pretraining.stopwatch import train_in_turns
from training.loop.distributed import World
from training.loop.step import Run
from training.pretrain import PretrainConfig
from training.run.job import open_job
from training.run.pretraining import Start
from training.run.recipes import RECIPES

# A rate at which neither side's loss diverges.
LR = 1e-4


def build(job: jobs.Job) -> Run:
    """The run, with AdamW as `transformers` has it."""
    config = PretrainConfig(
        output=Path("unused"),
        shards=job.shards,
        tokenizer=job.tokenizer,
        steps=sys.maxsize,
        device=torch.device(job.device),
        compile=job.compiles,
        recipe="paper",
        length=job.case.length,
        batch_size=job.case.num_rows,
        optimizer="adamw",
        lr=LR,
        schedule="wsd",
        decay=0.1,
        dropout="v2",
    )
    recipe = config.changed(RECIPES["paper"])
    start = Start(folder=None, name=None, tokenizer=job.tokenizer)
    world = World(device=config.device)
    return open_job(config, recipe, job.case.config, start, world, "auto").build()


def main() -> None:
    """Train the job that the first argument is."""
    channel = Channel()
    job = jobs.Job.from_json(sys.argv[1])
    torch.set_num_threads(job.num_threads)
    train_in_turns(build(job), channel)


if __name__ == "__main__":
    main()
