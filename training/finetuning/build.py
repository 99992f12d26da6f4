"""A finetuning run, built from its model and its tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from training.data.streams import ExampleStream
from training.errors import RunError
from training.finetuning.classification import Classification
from training.finetuning.config import FinetuneConfig
from training.finetuning.contrast import contrasts
from training.finetuning.model import load_start, new_classifiers
from training.finetuning.probing import Probing
from training.finetuning.start import Start
from training.finetuning.tasks import FinetuningTask
from training.finetuning.tokens import TokenTags
from training.loop import driver
from training.loop.distributed import World
from training.loop.early_stopping import BestValidation
from training.loop.progress import Progress
from training.loop.step import Mixture, Run
from training.model.heads import AlbertForTasks, Task

# The passes of a run whose end is not given: so many steps of them.
_STEPS: Final = 1500
_MIN_EPOCHS: Final = 3
_MAX_EPOCHS: Final = 20


def load_model(
    start: Start, tasks: Sequence[FinetuningTask], config: FinetuneConfig
) -> AlbertForTasks:
    """Load the checkpoint's model with the heads of the tasks.

    Raises:
        ConfigError, CheckpointError: as `load_checkpoint`.
    """
    torch.manual_seed(config.seed)
    labels = {name: task.labels for name, task in labelled_of(tasks).items()}
    return load_start(start, _trained_heads(tasks), labels)


def classifiers_of(tasks: Sequence[FinetuningTask]) -> dict[Task, Classification]:
    """Return the classifiers of texts among the tasks, by their heads in the model."""
    return {task.name: task for task in tasks if isinstance(task, Classification)}


def labelled_of(tasks: Sequence[FinetuningTask]) -> dict[Task, Classification | TokenTags]:
    """Return the tasks whose heads' outputs have names, by their heads in the model."""
    return {task.name: task for task in tasks if isinstance(task, Classification | TokenTags)}


def _trained_heads(tasks: Sequence[FinetuningTask]) -> list[Task]:
    return [head for task in tasks for stream in task.streams for head in stream.tasks]


def probing_of(
    model: AlbertForTasks, start: Start, tasks: Sequence[FinetuningTask], config: FinetuneConfig
) -> Probing | None:
    """Return the probing of the new classifiers, or of all if no step trains them; None without."""
    classifiers = classifiers_of(tasks)
    labels = {name: task.labels for name, task in labelled_of(tasks).items()}
    new = new_classifiers(start, labels)
    contrast_rate = config.lr if contrasts(tasks, config) else None
    fits_all = config.head_only or contrast_rate is not None
    fitted = {name: task for name, task in classifiers.items() if name in new or fits_all}
    if not fitted:
        return None
    return Probing.of(
        model, fitted, _trained_heads(tasks), seed=config.seed, contrast_rate=contrast_rate
    )


def build_run(
    model: AlbertForTasks,
    tasks: Sequence[FinetuningTask],
    config: FinetuneConfig,
    world: World,
    selection: BestValidation | None = None,
) -> Run:
    """Build the run at step 0; all processes must call it together.

    Raises:
        RunError: --weights or --epochs do not go with the tasks.
    """
    hyperparameters = config.hyperparameters
    return driver.build_run(
        model,
        Mixture(
            streams=[stream for task in tasks for stream in task.streams],
            weights=_weights(tasks, config),
            loss_weights=hyperparameters.loss_weights,
        ),
        {name: loss for task in tasks for name, loss in task.losses.items()},
        hyperparameters,
        progress=Progress(num_steps=_num_steps(tasks, config), budget_s=config.budget),
        world=world,
        precision=config.precision,
        selection=selection,
    )


def _weights(tasks: Sequence[FinetuningTask], config: FinetuneConfig) -> list[float]:
    """Return the weight of each task stream; pretraining's streams share one by --order-share."""
    weights = list(config.weights) or [1.0] * len(tasks)
    if len(weights) != len(tasks):
        names = ", ".join(task.name for task in tasks)
        raise RunError(f"--weights {weights}: give one for each of {names}")
    if not config.order_share:
        return weights
    *others, pretraining = weights
    return [*others, pretraining * (1 - config.order_share), pretraining * config.order_share]


def check_run(tasks: Sequence[FinetuningTask], config: FinetuneConfig) -> None:
    """Check --weights and the end of the run, before the model is loaded; raises as `build_run`."""
    _weights(tasks, config)
    _num_steps(tasks, config)


def _num_steps(tasks: Sequence[FinetuningTask], config: FinetuneConfig) -> int | None:
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


def steps_an_epoch(tasks: Sequence[FinetuningTask]) -> int | None:
    """Return the steps in which the one task's examples are read once; None of several tasks."""
    streams = [stream for task in tasks for stream in task.streams]
    match streams:
        case [ExampleStream() as stream]:
            return stream.steps_an_epoch
    return None
