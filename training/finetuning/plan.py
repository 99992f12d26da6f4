"""The plan of a finetuning run: its steps, and its validation, which chooses the best."""

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

# The passes of a run whose end is not given: so many steps of them.
_STEPS: Final = 1500
_MIN_EPOCHS: Final = 3
_MAX_EPOCHS: Final = 20
# Steps between validations of several tasks.
_VALIDATE_EVERY = 500
# Of a run whose end is not given, which has 3 to 20 passes.
_PATIENCE = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The steps and the validation of a run.

    Attributes:
        has_contrast: whether the encoder learns to tell the labels of few texts apart, in place of
            steps.
        validation, selection: None without held-out data.
        validate_every: steps between validations.
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
    validation, selection = _validating(tasks, config)
    has_contrast = _has_contrast(tasks, config)
    num_steps = 0 if has_contrast else _num_steps(tasks, config)
    return Plan(
        validation=validation,
        selection=selection,
        mixture=_mixture(tasks, config, loss_weights),
        progress=Progress(num_steps=num_steps, budget_s=config.budget),
        has_contrast=has_contrast,
        validate_every=config.validate_every or _steps_an_epoch(tasks) or _VALIDATE_EVERY,
    )


def _mixture(
    tasks: Sequence[TrainingTask], config: FinetuneConfig, loss_weights: Mapping[LossName, float]
) -> Mixture:
    """Return the task streams and their weights; pretraining's share one by --order-share."""
    weights = list(config.weights) or [1.0] * len(tasks)
    if len(weights) != len(tasks):
        names = ", ".join(task.name for task in tasks)
        raise RunError(f"--weights {weights}: give one for each of {names}")
    if config.order_share:
        *others, pretraining = weights
        share = pretraining * config.order_share
        weights = [*others, pretraining * (1 - config.order_share), share]
    streams = [stream for task in tasks for stream in task.streams]
    return Mixture(streams=streams, weights=weights, loss_weights=loss_weights)


def _num_steps(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> int | None:
    """Return the steps of a run by --steps and --epochs; None if its budget alone ends it."""
    steps, epochs = config.steps, config.epochs
    if config.head_only:
        return 0
    if not epochs and (steps or config.budget):
        return steps
    an_epoch = _steps_an_epoch(tasks)
    if an_epoch is None:
        raise RunError("epochs are those of one task; with several give --steps or --budget")
    epochs = epochs or max(_MIN_EPOCHS, min(_MAX_EPOCHS, round(_STEPS / an_epoch)))
    in_epochs = math.ceil(epochs * an_epoch)
    return min(in_epochs, steps or in_epochs)


def _steps_an_epoch(tasks: Sequence[TrainingTask]) -> int | None:
    """Return the steps in which the one task's examples are read once; None of several tasks."""
    streams = [stream for task in tasks for stream in task.streams]
    match streams:
        case [ExampleStream() as stream]:
            return stream.steps_per_epoch
    return None


def _has_contrast(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> bool:
    """Whether a run has a contrast: its end is not given, and its one task has few texts."""
    has_end = config.epochs or config.steps or config.budget or config.head_only
    match tasks:
        case [Classification() as data] if not has_end:
            return data.problem == "single_label_classification" and has_few_texts(data)
    return False


class _Validating(NamedTuple):
    """The validation of a run and the selection of its best; None without held-out data."""

    validation: Validation | None
    selection: BestValidation | None


def _validating(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> _Validating:
    """Return the validation on the held-out data of all tasks."""
    validated = [task for task in tasks if task.validation is not None]
    validations = [task.validation for task in tasks if task.validation is not None]
    if not validated:
        if config.patience or any(head.metric for head in config.classifiers):
            raise RunError("--patience and --metric need held-out data; give --validation")
        return _Validating(None, None)
    selection = _selection_of(validated, config)
    if len(validations) == 1:
        return _Validating(validations[0], selection)
    classifiers = [task for task in validated if isinstance(task, Classification)]
    together = Validation(
        batches=[batch for validation in validations for batch in validation.batches],
        tasks=tuple(task.name for task in classifiers),
        metrics={task.name: task.metrics.figures for task in classifiers},
        selecting_metrics={task.name: task.metric for task in classifiers},
    )
    return _Validating(together, selection)


def _selection_of(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> BestValidation:
    """Return the selection of the best validation; of several classifiers by their mean."""
    figures = [task.metric for task in tasks]
    figure = figures[0]
    if len(tasks) > 1:
        if lowest := [name for name in figures if name in LOWER_IS_BETTER]:
            raise RunError(
                f"--metric {lowest[0]}: with several classifiers validated, the mean of their "
                "metrics decides, of which the highest is the best; take another"
            )
        figure = HEADS_MEAN
    if config.splits_validation:
        files = [head.files.train for head in config.classifiers]
        files = [config.token_classification] if config.token_classification else files
        part = f"{config.validation_split:g} of "
    else:
        files, part = [head.files.validation for head in config.classifiers], ""
    return BestValidation(
        metric=figure,
        criterion="; ".join(
            _describe_held_out(figure, its, part)
            for figure, its in zip(figures, filter(None, files), strict=False)
        ),
        patience=_patience_of(config),
    )


def _patience_of(config: FinetuneConfig) -> int | None:
    """Return the patience: the default one only of a run whose end is not given."""
    has_end = config.has_end or config.epochs is not None
    return config.patience or (None if has_end else _PATIENCE)


def _describe_held_out(figure: str, held_out: Sequence[Path], part: str) -> str:
    """Describe a figure of held-out files, or of a part of them, by their names and content."""
    hashes = "".join(sha256_of(file) for path in held_out for file in _files_at(path))
    content = hashlib.sha256(hashes.encode()).hexdigest()[:12]
    return f"{figure} of {part}{', '.join(file_names(held_out))} (content {content})"


def _files_at(path: Path) -> list[Path]:
    """Return a file, or a folder's files: the held-out ones if the names tell splits."""
    of_split = files_of_split(path, "validation", suffixes=CHOICES) if path.is_dir() else []
    return of_split or find_files([path])
