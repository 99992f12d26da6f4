"""A finetuning run from its configuration to its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from albert_serve.tasks.text_length import describe_long_texts
from training.conversion.source import open_checkpoint
from training.finetuning.config import FinetuneConfig
from training.finetuning.model import Start, extra_config, head_fit_of, labels_of, load_start
from training.finetuning.plan import plan_of
from training.finetuning.recipes import hyperparameters_of
from training.finetuning.record import data_names, export_command, record_of
from training.finetuning.tasks import read_tasks, setup_of
from training.loop.checkpointing import Checkpoints
from training.loop.distributed import fail_together, join_world
from training.loop.driver import PreparedRun, TrainedRun, build_run, train_run
from training.loop.progress import contains_run, run_precision
from training.loop.step import Run
from training.tasks.base import TrainingTask
from training.tasks.embeddings.loss import VECTORS


def run_finetuning(config: FinetuneConfig) -> TrainedRun:
    """Train the run of a configuration to its end, or resume it."""
    with join_world(config.device) as world, ExitStack() as stack:
        with fail_together(world):
            config.check_files()
            checkpoint = stack.enter_context(open_checkpoint(config.initialize_from))
            folder = checkpoint.folder
            hyperparameters = hyperparameters_of(config, folder)
            record = record_of(config, hyperparameters)
            contains_run(config.output, record)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        precision = record["precision"] = run_precision(config.precision, config.output, world)
        with fail_together(world):
            start = Start.open(folder, config)
            setup = setup_of(config, start, world)
            tasks = read_tasks(config, start, setup)
            plan = plan_of(tasks, config, hyperparameters.loss_weights)
            torch.manual_seed(config.seed)
            model = load_start(
                start, [head for task in tasks for head in task.heads], labels_of(tasks)
            )
            fit = head_fit_of(
                model,
                start,
                tasks,
                fits_all=config.head_only or plan.has_contrast,
                seed=config.seed,
                contrast_rate=hyperparameters.lr if plan.has_contrast else None,
            )
        if fit is not None and not (config.output / "checkpoint").exists():
            fit.fit(world, precision)
        run = build_run(
            model,
            plan.mixture,
            {name: loss for task in tasks for name, loss in task.losses.items()},
            hyperparameters,
            progress=plan.progress,
            world=world,
            precision=precision,
            selection=plan.selection,
        )
        trained = train_run(
            PreparedRun(
                config=config,
                run=run,
                record=record,
                program="albert-serve finetune",
                stage={"settings": {**record, **data_names(config, checkpoint.name)}},
                start=folder,
                tokenizer_from=folder,
                extra_config=extra_config(start, model.tasks, tasks),
                sentence_vectors=VECTORS if config.embeddings else None,
                validation=plan.validation,
                validate_every=plan.validate_every,
                validates_start=fit is not None,
                compiles=setup.compiles,
            )
        )
        if trained.status == 0 and world.is_main and not _has_best(run):
            Checkpoints(folder=config.output, num_kept=config.keep).link_best(trained.num_steps)
        _report(trained, tasks, config)
        return trained


def _has_best(run: Run) -> bool:
    """Return whether this run, or the run that it resumes, selected a best checkpoint."""
    is_selected = run.selection is not None and run.selection.best_step is not None
    return is_selected or bool(run.earlier_selection)


def _report(trained: TrainedRun, tasks: Sequence[TrainingTask], config: FinetuneConfig) -> None:
    print(f"{trained.checkpoint}: {trained.num_steps:,} steps")
    counts = [task.long_texts for task in tasks]
    if num_long := sum(count.num_long for count in counts):
        num_texts = sum(count.num_texts for count in counts)
        print(describe_long_texts(num_long, num_texts, config.length, truncation=True))
    if trained.status == 0 and (command := export_command(config)):
        print(f"To export the checkpoint and measure it on the validation files, run: {command}")
