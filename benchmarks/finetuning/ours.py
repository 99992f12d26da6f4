"""A child process that finetunes with this package: the steps of `training.finetune`."""

from __future__ import annotations

import sys

import torch

from benchmarks.finetuning.data import read_examples
from benchmarks.finetuning.jobs import Job
from benchmarks.harness.channel import Channel
from benchmarks.pretraining.stopwatch import train_in_turns
from training.data.mask_rate import MaskRates
from training.data.streams import Division, example_stream
from training.loop.distributed import World
from training.loop.progress import Progress
from training.loop.step import Mixture, Run
from training.losses import LOSS_OF, compiled_losses
from training.model.heads import AlbertForTasks
from training.run.driver import build_run
from training.run.recipes import Hyperparameters
from training.system.precision import PrecisionName, product_dtype

# At which neither side's loss diverges.
LR = 1e-5


def build(job: Job) -> Run:
    """The run, with AdamW as `transformers` has it."""
    device = torch.device(job.device)
    name: PrecisionName = "bf16" if product_dtype(device) == torch.bfloat16 else "fp32"
    task, config = job.case.task, job.case.config
    torch.manual_seed(0)
    model = AlbertForTasks(config, {task: 2})
    hyperparameters = Hyperparameters(
        optimizer="adamw",
        lr=LR,
        adamw_lr=LR,
        pooled_factor=1.0,
        weight_decay=0.01,
        schedule="wsd",
        warmup=0.05,
        decay=0.1,
        sentence_weight=1.0,
        clip_norm=1.0,
    )
    feed = example_stream(
        task,
        read_examples(job.examples),
        config,
        batch_size=job.case.batch_size,
        seed=0,
        division=Division(by_length=device.type == "cpu"),
    )
    losses = compiled_losses() if job.compiles else LOSS_OF
    return build_run(
        model,
        Mixture(
            streams=[feed],
            weights=[1.0],
            loss_weights={},
            mask_rates=MaskRates(first=0.15, last=0.15),
        ),
        losses,
        hyperparameters,
        progress=Progress(num_steps=sys.maxsize, budget_s=None),
        world=World(device=device),
        precision=name,
    )


def main() -> None:
    """Train the job that the first argument is."""
    channel = Channel()
    job = Job.from_json(sys.argv[1])
    torch.set_num_threads(job.num_threads)
    train_in_turns(build(job), channel)


if __name__ == "__main__":
    main()
