"""Validation of a run on held-out examples, which its processes divide among them."""

from __future__ import annotations

from collections.abc import Callable

from albert_serve.progress import progress
from training.evaluation.validation import HeldOutItems, Validation, evaluating, measure
from training.loop.distributed import World, replica
from training.loop.step import Run
from training.losses import Tally
from training.model.heads import Task
from training.system.precision import precision


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
