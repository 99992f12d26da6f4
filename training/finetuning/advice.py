"""Advice at the end of a run: the option that would make it better."""

from __future__ import annotations

import math
from collections.abc import Iterator

from training.data.streams import ExampleStream
from training.finetuning.config import FinetuneConfig
from training.loop.step import Run


def describe_passes(run: Run) -> Iterator[str]:
    """Yield the steps of each task stream, with the passes over its examples if it has any."""
    for stream in run.mixture.streams:
        num_steps = run.num_steps[stream.name]
        if num_steps and isinstance(stream, ExampleStream):
            passes = num_steps / stream.steps_an_epoch
            yield f"{num_steps:,} of {stream.name}, {passes:.1f} passes over its examples"
        elif num_steps:
            yield f"{num_steps:,} of {stream.name}"


def advise(config: FinetuneConfig, run: Run) -> Iterator[str]:
    """Yield lines on a run that is done, but only fitted, too short, or at too high a rate."""
    short = [
        stream.name
        for stream in run.mixture.streams
        if isinstance(stream, ExampleStream) and run.num_steps[stream.name] < stream.steps_an_epoch
    ]
    if config.head_only:
        return
    if run.progress.num_steps == 0:
        yield "the classifier was fitted, since the texts are few; --epochs trains it on"
        return
    if short:
        yield f"the run ended before one pass over the examples of {', '.join(short)}"
    elif run.selection is not None and run.selection.best_step == 0:
        assert config.lr is not None
        yield (
            "the fitted classifier stayed the best; a lower rate may improve it: "
            f"--lr {config.lr / 4:g} and another --output"
        )
        return
    elif run.selection is not None and run.selection.rises(run.progress.step):
        yield "the validation was still getting better at the end"
    else:
        return
    yield f"to continue, run the same command with {_longer_end(config, run)}"


def _longer_end(config: FinetuneConfig, run: Run) -> str:
    """Return the option of twice the run, or of two passes if that is more."""
    factor = 2.0
    match run.mixture.streams:
        case [ExampleStream() as stream]:
            factor = max(factor, 2 * stream.steps_an_epoch / max(run.progress.step, 1))
            if config.budget is None and config.steps is None:
                return f"--epochs {factor * run.progress.step / stream.steps_an_epoch:.0f}"
    if config.budget is not None:
        return f"--budget {math.ceil(factor * config.budget / 60)}m"
    return f"--steps {math.ceil(factor * run.progress.step)}"
