"""Validation on held-out text: loss and accuracy of masked tokens and of the sentence task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from training.data.batch import LossName, MicroBatch, PretrainBatch
from training.data.collate import Collator
from training.data.examples import ExampleSettings
from training.data.masking import NgramMasking
from training.data.packing import Plan
from training.data.shards import Shards
from training.losses import Tally
from training.model.heads import AlbertForTasks, Task
from training.system.precision import PrecisionName, precision

# Fixed, so that all models predict the same tokens.
_SEED: Final = 12345
# Tokens per batch.
_TOKENS_A_BATCH: Final = 4096
# The mean of the figures of several classifiers.
HEADS_MEAN: Final = "mean_of_heads"


def held_out(
    shards: Shards, masking: NgramMasking, settings: ExampleSettings, *, max_rows: int | None = None
) -> Iterator[PretrainBatch]:
    """Yield batches of the packed rows of one epoch, or its first `max_rows`; deterministic."""
    plan = Plan(shards=shards, settings=settings, seed=_SEED)
    collate = Collator(shards=shards, masking=masking, length=settings.length, seed=_SEED)
    rows = islice(plan.epoch(0), max_rows)
    size = max(1, _TOKENS_A_BATCH // settings.length)
    while chunk := list(islice(rows, size)):
        yield collate(chunk)


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
    """Held-out batches, and the interval in steps of the validation on them.

    Attributes:
        tasks: the tasks of the batches; None for those of the run's first task stream.
        metrics: of classifiers of texts, from logits (N, K) and targets (N,); accuracy without.
        deciding: the figure of each of several classifiers, whose mean decides.
        held_out: items that are measured by the service's answers, in place of the batches.
    """

    batches: Sequence[MicroBatch]
    every: int
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


def unigram_entropy(shards: Shards, vocab_size: int) -> float:
    """Return the entropy of the corpus' token frequencies, in nats.

    It is the loss of a model that has learnt the token frequencies of this text and nothing else.
    """
    counts = shards.token_counts(vocab_size)
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())
