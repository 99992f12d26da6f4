"""The plan of a finetuning run: its steps, and the validation that selects the best checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from albert_serve.files import sha256_of
from training.data.batch import LossName
from training.data.corpus import find_files
from training.data.labelled.folders import CHOICES, files_of_split
from training.data.streams import ExampleStream
from training.errors import RunError
from training.finetuning.config import FinetuneConfig
from training.loop.early_stopping import LOWER_IS_BETTER, BestValidation
from training.loop.progress import Progress
from training.loop.step import Mixture
from training.loop.validation import HEADS_MEAN, Validation
from training.model.provenance import file_names
from training.tasks.base import TrainingTask
from training.tasks.classification.fitted_head import has_few_texts
from training.tasks.classification.loss import Classification

# A run without an end gets the epochs that make about 1500 steps, within these limits.
_STEPS: Final = 1500
_MIN_EPOCHS: Final = 3
_MAX_EPOCHS: Final = 20
# Default number of steps between validations of several tasks, which have no common epoch.
_VALIDATE_EVERY: Final = 500
# A run without an end stops after this number of validations without improvement.
_PATIENCE: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The steps and the validation of a run.

    Attributes:
        has_contrast: whether the encoder is trained by contrasting the labels of a few texts,
            instead of by steps.
        validation: validation of the run, or None without held-out data.
        selection: selection of the best checkpoint, or None without held-out data.
        validate_every: number of steps between validations.
    """

    mixture: Mixture
    progress: Progress
    has_contrast: bool
    validation: Validation | None
    selection: BestValidation | None
    validate_every: int


def plan_of(
    tasks: Sequence[TrainingTask], config: FinetuneConfig, loss_weights: Mapping[LossName, float]
) -> Plan:
    """Return the plan of a run of these tasks."""
    validation, selection = _held_out(tasks, config)
    has_contrast = _has_contrast(tasks, config)
    num_steps = 0 if has_contrast else _num_steps(tasks, config)
    return Plan(
        validation=validation,
        selection=selection,
        mixture=_mixture(tasks, config, loss_weights),
        progress=Progress(num_steps=num_steps, budget_s=config.budget),
        has_contrast=has_contrast,
        validate_every=config.validate_every or _steps_per_epoch(tasks) or _VALIDATE_EVERY,
    )


def _mixture(
    tasks: Sequence[TrainingTask], config: FinetuneConfig, loss_weights: Mapping[LossName, float]
) -> Mixture:
    """Return the task streams and their weights. --order-share divides pretraining's weight."""
    weights = list(config.weights) or [1.0] * len(tasks)
    if len(weights) != len(tasks):
        names = ", ".join(task.name for task in tasks)
        raise RunError(f"--weights {weights} is not one per task. Use one for each of {names}.")
    if config.order_share:
        *task_weights, weight = weights
        weights = [*task_weights, weight * (1 - config.order_share), weight * config.order_share]
    streams = [stream for task in tasks for stream in task.streams]
    return Mixture(streams=streams, weights=weights, loss_weights=loss_weights)


def _num_steps(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> int | None:
    """Return the run's number of steps, or None if only its budget ends it."""
    steps, epochs = config.steps, config.epochs
    if config.head_only:
        return 0
    if not epochs and (steps or config.budget):
        return steps
    steps_per_epoch = _steps_per_epoch(tasks)
    if steps_per_epoch is None:
        raise RunError(
            "The number of epochs is undefined for several tasks. Use --steps or --budget."
        )
    epochs = epochs or max(_MIN_EPOCHS, min(_MAX_EPOCHS, round(_STEPS / steps_per_epoch)))
    epoch_steps = math.ceil(epochs * steps_per_epoch)
    return min(epoch_steps, steps or epoch_steps)


def _steps_per_epoch(tasks: Sequence[TrainingTask]) -> int | None:
    """Return the number of steps in an epoch of a single task, or None for several tasks."""
    streams = [stream for task in tasks for stream in task.streams]
    match streams:
        case [ExampleStream() as stream]:
            return stream.steps_per_epoch
    return None


def _has_contrast(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> bool:
    """Return whether a run has a contrast: it has no end, and its one task has few texts."""
    has_end = config.epochs or config.steps or config.budget or config.head_only
    match tasks:
        case [Classification() as data] if not has_end:
            return data.problem == "single_label_classification" and has_few_texts(data)
    return False


class _HeldOut(NamedTuple):
    """The validation and the selection of a run, which are None without held-out data."""

    validation: Validation | None
    selection: BestValidation | None


def _held_out(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> _HeldOut:
    """Return the validation on the held-out data of all tasks."""
    validated = [task for task in tasks if task.validation is not None]
    validations = [task.validation for task in tasks if task.validation is not None]
    if not validated:
        if config.patience or any(head.metric for head in config.classifiers):
            raise RunError("--patience and --metric need held-out data. Use --validation.")
        return _HeldOut(None, None)
    selection = _selection_of(validated, config)
    if len(validations) == 1:
        return _HeldOut(validations[0], selection)
    classifiers = [task for task in validated if isinstance(task, Classification)]
    combined = Validation(
        batches=[batch for validation in validations for batch in validation.batches],
        tasks=tuple(task.name for task in classifiers),
        metrics={
            head: metric
            for validation in validations
            for head, metric in validation.metrics.items()
        },
        selecting_metrics={task.name: task.metric for task in classifiers},
    )
    return _HeldOut(combined, selection)


def _selection_of(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> BestValidation:
    """Return the selection of the best validation. Several classifiers are judged by their mean."""
    metrics = [task.metric for task in tasks]
    metric = metrics[0]
    if len(tasks) > 1:
        if lowest := [name for name in metrics if name in LOWER_IS_BETTER]:
            raise RunError(
                f"--metric {lowest[0]} does not apply to several classifiers, because the highest "
                "mean selects the best checkpoint. Use another metric."
            )
        metric = HEADS_MEAN
    if config.splits_validation:
        files = [head.files.train for head in config.classifiers]
        files = [config.token_classification] if config.token_classification else files
        part = f"{config.validation_split:g} of "
    else:
        files, part = [head.files.validation for head in config.classifiers], ""
    return BestValidation(
        metric=metric,
        criterion="; ".join(
            _describe_held_out(name, paths, part)
            for name, paths in zip(metrics, filter(None, files), strict=False)
        ),
        patience=_patience_of(config),
    )


def _patience_of(config: FinetuneConfig) -> int | None:
    """Return the patience, which has a default only if the run has no end."""
    has_end = config.has_end or config.epochs is not None
    return config.patience or (None if has_end else _PATIENCE)


def _describe_held_out(metric: str, held_out: Sequence[Path], part: str) -> str:
    """Describe a metric and its held-out files, or a part of them, by names and content."""
    hashes = "".join(sha256_of(file) for path in held_out for file in _files_at(path))
    content = hashlib.sha256(hashes.encode()).hexdigest()[:12]
    return f"{metric} of {part}{', '.join(file_names(held_out))} (content {content})"


def _files_at(path: Path) -> list[Path]:
    """Return a file, or a folder's validation files, or all its files if no name shows a split."""
    of_split = files_of_split(path, "validation", suffixes=CHOICES) if path.is_dir() else []
    return of_split or find_files([path])
