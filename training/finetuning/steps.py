"""The steps of a finetuning run: how many, and of which task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from training.data.batch import LossName
from training.data.streams import ExampleStream
from training.errors import RunError
from training.finetuning.config import FinetuneConfig
from training.loop.step import Mixture
from training.tasks.base import TrainingTask
from training.tasks.classification.fitted_head import has_few_texts
from training.tasks.classification.loss import Classification

# The passes of a run whose end is not given: so many steps of them.
_STEPS: Final = 1500
_MIN_EPOCHS: Final = 3
_MAX_EPOCHS: Final = 20


def mixture_of(
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


def num_steps(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> int | None:
    """Return the steps of a run by --steps and --epochs; None if its budget alone ends it."""
    steps, epochs = config.steps, config.epochs
    if config.head_only or contrasts(tasks, config):
        return 0
    if not epochs and (steps or config.budget):
        return steps
    an_epoch = steps_an_epoch(tasks)
    if an_epoch is None:
        raise RunError("epochs are those of one task; with several give --steps or --budget")
    epochs = epochs or max(_MIN_EPOCHS, min(_MAX_EPOCHS, round(_STEPS / an_epoch)))
    in_epochs = math.ceil(epochs * an_epoch)
    return min(in_epochs, steps or in_epochs)


def steps_an_epoch(tasks: Sequence[TrainingTask]) -> int | None:
    """Return the steps in which the one task's examples are read once; None of several tasks."""
    streams = [stream for task in tasks for stream in task.streams]
    match streams:
        case [ExampleStream() as stream]:
            return stream.steps_an_epoch
    return None


def contrasts(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> bool:
    """Whether a run has a contrast: its end is not given, and its one task has few texts."""
    has_end = config.epochs or config.steps or config.budget or config.head_only
    match tasks:
        case [Classification() as data] if not has_end:
            return data.problem == "single_label_classification" and has_few_texts(data)
    return False
