"""Task streams: the micro-batches of each training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from albert_serve.tasks.grouping import cut_batches
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, LossName, MicroBatch, TokenisedExample
from training.data.collate import Collate, Slicing, load_steps
from training.data.packing import Plan, Position
from training.model.heads import Task

if TYPE_CHECKING:
    # It imports corpus readers, which a run on shards does not need.
    from training.data.datasets import LabelledText

# Examples are sorted by length within this number of batches.
_BATCHES_SORTED_TOGETHER: Final = 50


class Feed(Protocol):
    """An endless task stream: the micro-batches of each step, determined by the seed."""

    @property
    def name(self) -> str:
        """The name, unique among a run's task streams."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks whose heads it trains."""

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of its micro-batches: those of the tasks, and additional ones."""

    def step(self) -> Sequence[MicroBatch]:
        """Return this process' micro-batches of the next step."""

    def state(self) -> list[int]:
        """Return the position of the next step."""

    def restore(self, state: Sequence[int]) -> None:
        """Move to a saved position, forwards or backwards."""


@dataclass(kw_only=True)
class BatchFeed:
    """Task stream with one micro-batch a step, from an iterator that can be restarted.

    Attributes:
        stream: returns an iterator over the micro-batches from the first on.
    """

    name: str
    tasks: tuple[Task, ...]
    stream: Callable[[], Iterator[MicroBatch]]
    _num_taken: int = 0
    _micro_batches: Iterator[MicroBatch] | None = None

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of its tasks."""
        return self.tasks

    def step(self) -> Sequence[MicroBatch]:
        """Return the next micro-batch."""
        if self._micro_batches is None:
            self._micro_batches = self.stream()
        self._num_taken += 1
        return [next(self._micro_batches)]

    def state(self) -> list[int]:
        """Return the number of micro-batches taken so far."""
        return [self._num_taken]

    def restore(self, state: Sequence[int]) -> None:
        """Skip the micro-batches taken before."""
        (self._num_taken,) = state
        self._micro_batches = islice(self.stream(), self._num_taken, None)


@dataclass(kw_only=True)
class PlannedFeed:
    """Task stream over the packed rows of a plan.

    Attributes:
        num_workers: number of data loader workers.
        further_losses: losses of its micro-batches besides those of its tasks.
    """

    plan: Plan
    collate: Collate
    slicing: Slicing
    num_workers: int = 0
    name: str = "pretraining"
    further_losses: tuple[LossName, ...] = ()
    _position: Position = field(default_factory=Position)
    _steps: Iterator[tuple[list[MicroBatch], Position]] | None = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks whose heads it trains."""
        if self.plan.settings.sentence_task == "none":
            return ("fill-mask",)
        return ("fill-mask", "sentence-order")

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of its tasks, and the further ones."""
        return (*self.tasks, *self.further_losses)

    def step(self) -> Sequence[MicroBatch]:
        """Return this process' micro-batches of the next step.

        Raises:
            TrainingError: the corpus yields no example.
        """
        if self._steps is None:
            self._steps = load_steps(
                self.plan,
                self.collate,
                self.slicing,
                self._position,
                num_workers=self.num_workers,
            )
        batches, self._position = next(self._steps)
        return batches

    def state(self) -> list[int]:
        """Return epoch, window and row of the next step."""
        return list(self._position)

    def restore(self, state: Sequence[int]) -> None:
        """Move to that epoch, window and row."""
        self._position = Position(*state)
        self._steps = None


def example_feed(
    task: Task, examples: Sequence[TokenisedExample], *, tokens_a_batch: int, seed: int
) -> BatchFeed:
    """Return the task stream of examples of one task, in micro-batches bucketed by length."""
    lengths = [len(example.ids) for example in examples]
    return BatchFeed(
        name=task,
        tasks=(task,),
        stream=lambda: (
            ExampleBatch.of(task, [examples[index] for index in batch])
            for batch in like_lengths(lengths, tokens_a_batch=tokens_a_batch, seed=seed)
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledExample:
    """A tokenised text and its label."""

    ids: list[int]
    types: list[int]
    label: int

    @property
    def target(self) -> int:
        """The label."""
        return self.label


def labelled_examples(
    texts: Sequence[LabelledText], tokenizer: AlbertTokenizer, *, length: int
) -> tuple[list[LabelledExample], int]:
    """Tokenise the texts, drop those over `length` tokens, and return how many were dropped."""
    encoded = [(tokenizer.encode(text.text, text.pair), text.label) for text in texts]
    kept = [
        LabelledExample(ids=encoding.ids, types=encoding.types, label=label)
        for encoding, label in encoded
        if len(encoding) <= length
    ]
    return kept, len(encoded) - len(kept)


def like_lengths(lengths: Sequence[int], *, tokens_a_batch: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of indices, bucketed by length, without end; each epoch in another order."""
    sizes = np.asarray(lengths)
    pool = max(1, _BATCHES_SORTED_TOGETHER * tokens_a_batch // int(sizes.mean()))
    for epoch in count():
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(len(sizes))
        batches: list[list[int]] = []
        for begin in range(0, len(order), pool):
            part = order[begin : begin + pool]
            ascending = part[np.argsort(sizes[part], kind="stable")]
            batches += cut_batches(ascending.tolist(), sizes, tokens_a_batch)
        yield from (batches[index] for index in rng.permutation(len(batches)))
