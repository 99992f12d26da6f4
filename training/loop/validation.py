"""Validation of a model in training on held-out data, which the run's processes divide."""

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
from training.loop.distributed import World, replica
from training.loop.step import Run
from training.losses import Tally
from training.model.heads import AlbertForTasks, Task
from training.system.precision import PrecisionName, precision

# The mean of the figures of several classifiers.
HEADS_MEAN: Final = "mean_of_heads"


class HeldOutItems(Protocol):
    """Held-out items of a task that a model in training answers as the service does."""

    @property
    def task(self) -> Task:
        """The task."""

    def answer(
        self, model: AlbertForTasks, own: slice, *, should_stop: Callable[[], bool]
    ) -> list[Any] | None:
        """Answer a part of the items; None if `should_stop` interrupted it."""

    def figures(self, answered: Sequence[Any]) -> dict[str, float]:
        """Return the figures of all answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Held-out data, and what is measured on it.

    Attributes:
        tasks: the tasks of the batches; None for those of the run's first task stream.
        metrics: of classifiers of texts, from logits (N, K) and targets (N,); accuracy without.
        deciding: the figure of each of several classifiers, whose mean decides.
        held_out: items that are measured by the service's answers, in place of the batches.
    """

    batches: Sequence[MicroBatch] = ()
    tasks: tuple[Task, ...] | None = None
    metrics: Mapping[Task, Callable[[Tensor, Tensor], Mapping[str, float]]] = field(
        default_factory=dict
    )
    deciding: Mapping[Task, str] = field(default_factory=dict)
    held_out: HeldOutItems | None = None

    def figures(self, task: Task, tally: Tally) -> dict[str, float]:
        """Return the figures of a task's tally by name."""
        figures = {"loss": tally.loss}
        if task in self.metrics:
            return {**figures, **self.metrics[task](*tally.predictions)}
        return {**figures, "accuracy": tally.accuracy}

    def decisive(self, figures: Mapping[Task, Mapping[str, float]]) -> Mapping[str, float]:
        """Return the figures by which a validation is the best: of the first task, or the mean."""
        if not self.deciding:
            return next(iter(figures.values()))
        return {HEADS_MEAN: fmean(figures[task][name] for task, name in self.deciding.items())}


def measure(
    objective: nn.Module,
    batches: Iterable[MicroBatch],
    tasks: Sequence[LossName],
    device: torch.device,
    products: PrecisionName = "auto",
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[LossName, Tally] | None:
    """Return the tally of each loss over the batches; None if `should_stop` interrupted it.

    Args:
        objective: the `Objective`.
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
    """Disable dropout, gradients and code that was compiled for training; for `with`."""
    in_training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for part in in_training:
            part.training = True


def validate(
    run: Run, validation: Validation, *, should_stop: Callable[[], bool]
) -> dict[Task, dict[str, float]] | None:
    """Return the figures of each task, the same in all processes; None if it was interrupted.

    All processes must call it. Each measures every N-th batch.

    Args:
        should_stop: whether a single process is interrupted; several finish it.
    """
    if validation.held_out is not None:
        return _validate_items(run, validation.held_out, should_stop)
    world = run.world
    places = range(world.rank, len(validation.batches), world.size)
    tallies = measure(
        replica(run.objective),
        (validation.batches[n] for n in progress(places, title="validation", unit="batches")),
        validation.tasks or run.mixture.streams[0].tasks,
        world.device,
        run.precision,
        should_stop=lambda: world.size == 1 and should_stop(),
    )
    if tallies is None:
        return None
    return {
        task: _agreed(validation.figures(task, tally), world)
        for task, tally in _merged(world.gather(tallies)).items()
    }


def _validate_items(
    run: Run, held_out: HeldOutItems, should_stop: Callable[[], bool]
) -> dict[Task, dict[str, float]] | None:
    """Return the figures of the answers; each process answers every N-th item."""
    world = run.world
    with evaluating(run.objective), precision(world.device, run.precision):
        answered = held_out.answer(
            run.model,
            slice(world.rank, None, world.size),
            should_stop=lambda: world.size == 1 and should_stop(),
        )
    if answered is None:
        return None
    every = [each for part in world.gather(answered) for each in part]
    return {held_out.task: _agreed(held_out.figures(every), world)}


def _merged(parts: list[dict[Task, Tally]]) -> dict[Task, Tally]:
    whole, *others = parts
    for part in others:
        for task, tally in part.items():
            whole[task].merge(tally)
    return whole


def _agreed(figures: dict[str, float], world: World) -> dict[str, float]:
    """Return the main process' figures: another host may round otherwise, and decide otherwise."""
    values = world.sum([value if world.is_main else 0.0 for value in figures.values()])
    return dict(zip(figures, values, strict=True))
