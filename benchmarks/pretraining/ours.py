"""A child process that pretrains with this package: the steps of `training.pretrain`."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from benchmarks.harness.channel import Channel
from benchmarks.pretraining import jobs
from benchmarks.pretraining.stopwatch import train_in_turns
from training.data.shards import Shards
from training.loop.distributed import World
from training.loop.progress import Progress
from training.loop.step import Run
from training.run.job import Job
from training.run.recipes import RECIPES

# A rate at which neither side's loss diverges.
LR = 1e-4


def build(job: jobs.Job) -> Run:
    """The run, with AdamW as `transformers` has it."""
    recipe = replace(
        RECIPES["paper"],
        length=job.case.length,
        batch_size=job.case.num_rows,
        optimizer="adamw",
        lr=LR,
        schedule="wsd",
        decay=0.1,
        dropout="v2",
    )
    return Job(
        config=job.case.config,
        recipe=recipe,
        progress=Progress(num_steps=sys.maxsize, budget_s=None),
        shards=Shards.open(job.shards, job.tokenizer / "tokenizer.json"),
        tokenizer=job.tokenizer,
        world=World(device=torch.device(job.device)),
        compiles=job.compiles,
    ).build()


def main() -> None:
    """Train the job that the first argument is."""
    channel = Channel()
    job = jobs.Job.from_json(sys.argv[1])
    torch.set_num_threads(job.num_threads)
    train_in_turns(build(job), channel)


if __name__ == "__main__":
    main()
