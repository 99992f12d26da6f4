"""Validation during training: the run's processes divide the held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from albert_serve.progress import progress
from training.data.batch import LossName, MicroBatch
from training.loop.distributed import World, unwrap
from training.loop.step import Run
from training.losses import Tally
from training.model.heads import AlbertForTasks, Task
from training.system.precision import PrecisionName, precision

# Name of the mean of several classifiers' metrics.
HEADS_MEAN: Final = "mean_of_heads"


class HeldOutItems(Protocol):
    """Held-out items of a task, which a model in training answers like the service."""

    @property
    def task(self) -> Task:
        """The task of the items."""

    def answer(
        self, model: AlbertForTasks, part: slice, *, should_stop: Callable[[], bool]
    ) -> list[Any] | None:
        """Return the answers to a part of the items, or None if `should_stop` interrupted it."""

    def compute_metrics(self, answers: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of all answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Held-out data and its metrics.

    Attributes:
        batches: held-out micro-batches.
        tasks: tasks of the batches, or None for the tasks of the run's first task stream.
        metrics: metric function of each text classifier, from logits (N, K) and targets (N,).
            Other tasks have the accuracy.
        selecting_metrics: metric of each classifier, if there are several. The mean of these
            metrics selects the best checkpoint.
        held_out: items whose metrics come from the service's answers, instead of batches.
    """

    batches: Sequence[MicroBatch] = ()
    tasks: tuple[Task, ...] | None = None
    metrics: Mapping[Task, Callable[[Tensor, Tensor], Mapping[str, float]]] = field(
        default_factory=dict
    )
    selecting_metrics: Mapping[Task, str] = field(default_factory=dict)
    held_out: HeldOutItems | None = None

    def compute_metrics(self, task: Task, tally: Tally) -> dict[str, float]:
        """Return the metrics of a task's tally by name."""
        if task in self.metrics:
            return {"loss": tally.loss, **self.metrics[task](*tally.predictions)}
        return {"loss": tally.loss, "accuracy": tally.accuracy}

    def selection_metrics(self, by_task: Mapping[Task, Mapping[str, float]]) -> Mapping[str, float]:
        """Return the metrics that select the best checkpoint: the first task's, or `HEADS_MEAN`."""
        if not self.selecting_metrics:
            return next(iter(by_task.values()))
        values = (by_task[task][name] for task, name in self.selecting_metrics.items())
        return {HEADS_MEAN: fmean(values)}


def measure(
    objective: nn.Module,
    batches: Iterable[MicroBatch],
    tasks: Sequence[LossName],
    device: torch.device,
    products: PrecisionName = "auto",
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[LossName, Tally] | None:
    """Return the tally of each loss over the batches, or None if `should_stop` interrupted it.

    Args:
        objective: an `Objective`.
        tasks: names of the losses.
        products: precision of matrix products.
    """
    tallies: dict[LossName, Tally] = {task: Tally() for task in tasks}
    with evaluating(objective), precision(device, products):
        for batch in batches:
            if should_stop():
                return None
            scores = objective(batch)
            for task, score in scores.items():
                if task in tallies:
                    tallies[task].add(score)
    return tallies


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Disable dropout, gradients and code that was compiled for training, within `with`."""
    training_modules = [child for child in module.modules() if child.training]
    module.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for child in training_modules:
            child.training = True


def validate(
    run: Run, validation: Validation, *, should_stop: Callable[[], bool]
) -> dict[Task, dict[str, float]] | None:
    """Return the metrics of each task, the same in all processes, or None if it was interrupted.

    All processes must call this function. Each of N processes validates every N-th batch.

    Args:
        should_stop: function that interrupts the validation of a single process. Several
            processes always finish their validation.
    """
    if validation.held_out is not None:
        return _validate_items(run, validation.held_out, should_stop)
    world = run.world
    indices = range(world.rank, len(validation.batches), world.size)
    tallies = measure(
        unwrap(run.objective),
        (validation.batches[n] for n in progress(indices, title="validation", unit="batches")),
        validation.tasks or run.mixture.streams[0].tasks,
        world.device,
        run.precision,
        should_stop=lambda: world.size == 1 and should_stop(),
    )
    if tallies is None:
        return None
    return {
        task: _main_metrics(validation.compute_metrics(task, tally), world)
        for task, tally in _merge(world.gather(tallies)).items()
    }


def _validate_items(
    run: Run, held_out: HeldOutItems, should_stop: Callable[[], bool]
) -> dict[Task, dict[str, float]] | None:
    """Return the metrics of the answers, of which each of N processes computes every N-th."""
    world = run.world
    with evaluating(run.objective), precision(world.device, run.precision):
        answers = held_out.answer(
            run.model,
            slice(world.rank, None, world.size),
            should_stop=lambda: world.size == 1 and should_stop(),
        )
    if answers is None:
        return None
    all_answers = [answer for part in world.gather(answers) for answer in part]
    return {held_out.task: _main_metrics(held_out.compute_metrics(all_answers), world)}


def _merge(parts: list[dict[Task, Tally]]) -> dict[Task, Tally]:
    merged, *others = parts
    for part in others:
        for task, tally in part.items():
            merged[task].merge(tally)
    return merged


def _main_metrics(metrics: dict[str, float], world: World) -> dict[str, float]:
    """Return the main process' metrics: another host may round, and thus decide, differently."""
    values = world.sum([value if world.is_main else 0.0 for value in metrics.values()])
    return dict(zip(metrics, values, strict=True))
