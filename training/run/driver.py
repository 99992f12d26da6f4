"""Training of a built run, new or resumed, with its checkpoints and records."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.evaluation.validation import Validation
from training.loop.checkpointing import Checkpoints
from training.loop.metrics import Metrics
from training.loop.plateau import PlateauAlarm
from training.loop.progress import record_run
from training.loop.provenance import read_stages
from training.loop.step import Run
from training.loop.trainer import Saver, Trainer
from training.model.checkpoint import read_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The origin of a run's checkpoints, which is written into each of them.

    Attributes:
        program: module that trains, such as `training.pretrain`.
        stage: the settings and data of this run, for the checkpoint's `training.json`.
        tokenizer_from: folder of the tokenizer.
        extra_config: additional keys of the checkpoint's `config.json`.
    """

    program: str
    stage: Mapping[str, Any]
    tokenizer_from: Path
    extra_config: Mapping[str, Any]


def train_run(
    options: argparse.Namespace,
    run: Run,
    record: Mapping[str, Any],
    origin: Origin,
    *,
    alarm: PlateauAlarm | None = None,
    validation: Validation | None = None,
    flops_a_token: float = 0.0,
    peak_flops: float = 0.0,
) -> int:
    """Train a run to its end, resuming it from the output folder; return the exit status.

    Args:
        options: of `options.add_reports`, with `output` and `initialize_from`.
        run: at step 0.
        record: content of the folder's `run.json`, whose settings `is_known_run` has compared.
        alarm, validation, flops_a_token, peak_flops: as in `Trainer`.

    Raises:
        RunError: as `Saver.resume` and `Trainer.train`.
    """
    start = options.initialize_from
    # Read now: the folders may be temporary, or be removed in the days that a run takes.
    saver = Saver(
        folder=options.output,
        checkpoints=Checkpoints(folder=options.output, num_kept=options.keep),
        tokenizer=read_tokenizer(origin.tokenizer_from),
        every_s=options.save_every,
        program=origin.program,
        stage=origin.stage,
        earlier_stages=read_stages(start) if start is not None else (),
        extra_config=origin.extra_config,
    )
    is_main = run.world.is_main
    if saver.resume(run) and is_main:
        print(f"resuming from step {run.progress.step:,}")
    if is_main:
        record_run(options.output, record)  # also if it is known: its end may be another one
    trainer = Trainer(
        run=run,
        saver=saver,
        metrics=Metrics(options.output, step=run.progress.step) if is_main else None,
        report_every=options.report_every,
        alarm=alarm,
        validation=validation,
        flops_a_token=flops_a_token,
        peak_flops=peak_flops,
    )
    return trainer.train()
