"""Building a run from its parts, and training it to its end with checkpoints and records."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from albert_serve.bundle.sentence_vectors import SentenceVectors, read_sentence_vectors
from training.loop.checkpointing import Checkpoints
from training.loop.distributed import World, replicate
from training.loop.early_stopping import BestValidation
from training.loop.metrics import MetricsWriter
from training.loop.progress import Progress, record_run
from training.loop.step import Mixture, Run
from training.loop.trainer import Saver, Trainer
from training.loop.validation import Validation
from training.losses import LossFunction, Objective
from training.model.checkpoint import read_tokenizer
from training.model.heads import AlbertForTasks
from training.model.provenance import read_quality, read_stages
from training.optim.optimizers import Hyperparameters, build_optimizers
from training.options.config import RunFolder
from training.system.precision import PrecisionName, has_varlen


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """A run that has ended or was stopped.

    Attributes:
        status: exit status, which is 0 for a complete run, or else 128 + the signal's number.
        checkpoint: link in the run's folder to the newest checkpoint.
        num_steps: number of steps so far.
        selection: best validation, whose checkpoint is linked as `best`, or None if the run does
            not validate.
    """

    status: int
    checkpoint: Path
    num_steps: int
    selection: BestValidation | None

    @property
    def best(self) -> Path:
        """Folder of the checkpoint with the best validation, or of the newest if there is none."""
        has_best = self.selection is not None and self.selection.best_step is not None
        return self.checkpoint.with_name("best") if has_best else self.checkpoint

    @property
    def validations(self) -> list[dict[str, float]]:
        """Lines of `metrics.jsonl` with the metrics of each validation and its `step`."""
        file = self.checkpoint.with_name("metrics.jsonl")
        if not file.is_file():  # the run only fitted a head, without held-out texts
            return []
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if any(name.startswith("validation/") for name in line)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run at step 0, its validation, and the records for its folder and checkpoints.

    `Saver` and `Trainer` describe the other attributes.

    Attributes:
        record: content of the folder's `run.json`, which `contains_run` has compared.
        start: folder of the checkpoint whose weights the run starts with, or None for new weights.
        tokenizer_from: folder of the tokenizer.
        sentence_vectors: settings of the embeddings that the run trains, or None for the settings
            of `start`, if any.
    """

    config: RunFolder
    run: Run
    record: Mapping[str, Any]
    program: str
    stage: Mapping[str, Any]
    start: Path | None
    tokenizer_from: Path
    extra_config: Mapping[str, Any]
    sentence_vectors: SentenceVectors | None = None
    validation: Validation | None = None
    validate_every: int = 1
    validates_start: bool = False
    compiles: bool = False

    def saver(self) -> Saver:
        """Return the writer of the run's checkpoints.

        This method reads the folders now, because they may be removed during a long run.
        """
        start, stage, vectors = self.start, self.stage, self.sentence_vectors
        if start is not None:
            stage = {**stage, "before": read_quality(start)}
            vectors = vectors or read_sentence_vectors(start)
        return Saver(
            checkpoints=Checkpoints(folder=self.config.output, num_kept=self.config.keep),
            tokenizer=read_tokenizer(self.tokenizer_from),
            every_s=self.config.save_every,
            program=self.program,
            stage=stage,
            earlier_stages=read_stages(start) if start is not None else (),
            extra_config=self.extra_config,
            sentence_vectors=vectors,
        )


def build_run(
    model: AlbertForTasks,
    mixture: Mixture,
    loss_of: Mapping[str, LossFunction],
    hyperparameters: Hyperparameters,
    *,
    progress: Progress,
    world: World,
    precision: PrecisionName,
    selection: BestValidation | None = None,
) -> Run:
    """Build the run of a model at step 0."""
    model = model.to(world.device)
    model.albert.has_varlen = has_varlen(world.device)
    trains_all = all(set(model.heads) == set(stream.tasks) for stream in mixture.streams)
    objective = Objective(model, world.device, loss_of)
    return Run(
        model=model,
        objective=replicate(objective, world, trains_all=trains_all),
        optimizers=build_optimizers(model, hyperparameters, precision),
        schedule=hyperparameters.rate_schedule,
        mixture=mixture,
        clip_norm=hyperparameters.clip_norm,
        seed=hyperparameters.seed,
        world=world,
        progress=progress,
        precision=precision,
        selection=selection,
    )


def train_run(prepared: PreparedRun) -> TrainedRun:
    """Train a run to its end, resuming it from its folder.

    Raises:
        RunError: the run could not be resumed, trained or saved.
        KeyboardInterrupt: SIGINT, as a notebook sends it, stopped the run after saving its step.
    """
    config, run, saver = prepared.config, prepared.run, prepared.saver()
    is_main = run.world.is_main
    if saver.resume(run) and is_main:
        print(f"Resuming from step {run.progress.step:,}.")
    if is_main:
        # Settings of the run's end may have changed since the run was started.
        record_run(config.output, prepared.record)
    trainer = Trainer(
        run=run,
        saver=saver,
        metrics=MetricsWriter(config.output, step=run.progress.step) if is_main else None,
        report_every=config.report_every,
        validation=prepared.validation,
        validate_every=prepared.validate_every,
        validates_start=prepared.validates_start,
        compiles=prepared.compiles,
    )
    status = trainer.train()
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt(f"Stopped after step {run.progress.step:,}, which is saved.")
    return TrainedRun(
        status=status,
        checkpoint=config.output / "checkpoint",
        num_steps=run.progress.step,
        selection=run.selection,
    )
