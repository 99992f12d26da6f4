"""Task streams: the micro-batches of each training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from itertools import count as naturals
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from albert_serve.config import AlbertConfig
from training.data.batch import LossName, MicroBatch, TokenisedExample
from training.data.collate import Collate, Slicing, collate_examples, load_steps
from training.data.packing import Plan, Position, best_row_length, shortest_row_length
from training.errors import TrainingError
from training.model.heads import Task

# The row length is chosen by packing this number of batches.
NUM_SAMPLED_BATCHES: Final = 50
# Minimum number of tokens in a forward pass. With fewer tokens, matrix products are slow.
_TOKENS_PER_PASS: Final = 1024
# If rows contain examples of similar lengths, the row length is a multiple of this number.
_ROW_MULTIPLE: Final = 16
_ExampleT = TypeVar("_ExampleT")


class TaskStream(Protocol):
    """An endless task stream. The seed determines the micro-batches of each step."""

    @property
    def name(self) -> str:
        """The name of the stream, unique in a run."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks whose heads the stream trains."""

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of the micro-batches: one for each task, and any additional losses."""

    def step(self) -> Sequence[MicroBatch]:
        """Return this process' micro-batches of the next step."""

    def state(self) -> list[int]:
        """Return the position of the next step."""

    def restore(self, state: Sequence[int]) -> None:
        """Move to a saved position, forwards or backwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Division of a step's examples into micro-batches and among processes.

    The division does not change the loss, which is the mean over all examples of the step.

    Attributes:
        micro_batch_size: maximum number of examples in a micro-batch, or None for one micro-batch
            per process.
        rank: number of this process, which takes every `world_size`-th micro-batch.
        world_size: number of processes.
        by_length: whether to group examples of similar lengths, in rows as short as possible.
            Without FlashAttention, for example on a CPU, attention takes time quadratic in the row
            length.
    """

    micro_batch_size: int | None = None
    rank: int = 0
    world_size: int = 1
    by_length: bool = False

    def parts(
        self, examples: Sequence[_ExampleT], size_of: Callable[[_ExampleT], int]
    ) -> list[Sequence[_ExampleT]]:
        """Divide the examples into parts of similar size, at least one part per process."""
        num_parts = max(
            self.world_size, -(-len(examples) // (self.micro_batch_size or len(examples)))
        )
        if num_parts == 1:
            return [examples]
        ordered = sorted(examples, key=size_of, reverse=True)
        return [ordered[number::num_parts] for number in range(num_parts)]

    def passes(
        self, examples: Sequence[_ExampleT], size_of: Callable[[_ExampleT], int]
    ) -> Iterator[Sequence[_ExampleT]]:
        """Yield a part's examples, divided into forward passes."""
        if not self.by_length:
            yield examples
            return
        ordered = sorted(examples, key=size_of, reverse=True)
        sizes = np.array([size_of(example) for example in ordered])
        num_passes = max(1, int(sizes.sum()) // _TOKENS_PER_PASS)
        pass_of = (np.cumsum(sizes) - sizes / 2) * num_passes // sizes.sum()
        for number in np.unique(pass_of):
            yield [ordered[index] for index in np.flatnonzero(pass_of == number)]

    def row_length(self, sizes: Iterable[int], maximum: int) -> int:
        """Return the row length of a micro-batch with examples of these sizes."""
        if not self.by_length:
            return maximum
        return shortest_row_length(max(sizes), maximum=maximum, multiple=_ROW_MULTIPLE)

    @property
    def micro_batches(self) -> slice:
        """Slice that selects this process' micro-batches among all micro-batches of a step."""
        return slice(self.rank, None, self.world_size)


# One process computes a step in one micro-batch.
UNDIVIDED: Final = Division()


@dataclass(kw_only=True)
class ExampleStream(Generic[_ExampleT]):
    """A task stream of one task's examples: `batch_size` per step, each once per epoch.

    Attributes:
        row_length: maximum number of tokens in a row.
        division: division of a step's examples among processes and micro-batches.
    """

    task: Task
    examples: Sequence[_ExampleT]
    batch_size: int
    row_length: int
    seed: int
    division: Division = UNDIVIDED
    _num_steps: int = 0
    _batches: Iterator[list[int]] | None = None

    def __post_init__(self) -> None:
        if not self.examples:
            raise TrainingError(f"{self.task} has no examples to train on.")
        min_examples = len(self.examples) // self.steps_per_epoch
        if min_examples < self.division.world_size:
            raise TrainingError(
                f"--batch-size {self.batch_size} of {self.task} has {min_examples} of "
                f"{len(self.examples):,} examples in a step, fewer than the "
                f"{self.division.world_size} processes. Increase it, or use fewer processes."
            )

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that read every example once."""
        return -(-len(self.examples) // self.batch_size)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The task."""
        return (self.task,)

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The task's loss."""
        return (self.task,)

    def step(self) -> Sequence[MicroBatch]:
        """Return this process' micro-batches of the next step."""
        if self._batches is None:
            batches = shuffled_batches(len(self.examples), self.batch_size, self.seed)
            self._batches = islice(batches, self._num_steps, None)
        self._num_steps += 1
        examples = [self.examples[index] for index in next(self._batches)]
        parts = self.division.parts(examples, self.size_of)
        passes = [examples for part in parts for examples in self.passes(part)]
        return [self.collate(examples) for examples in passes[self.division.micro_batches]]

    def size_of(self, example: Any) -> int:
        """Return the number of tokens in all sequences of an example."""
        return sum(example.lengths)

    def passes(self, examples: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Return a part's examples, divided into forward passes."""
        return list(self.division.passes(examples, self.size_of))

    def collate(self, examples: Sequence[Any]) -> MicroBatch:
        """Return examples as one micro-batch, in rows of the length that the division sets."""
        sizes = chain.from_iterable(example.lengths for example in examples)
        return self.pack(examples, self.division.row_length(sizes, self.row_length))

    def pack(self, examples: Sequence[Any], row_length: int) -> MicroBatch:
        """Return examples as one micro-batch in rows of this length."""
        return collate_examples(self.task, examples, row_length=row_length)

    def state(self) -> list[int]:
        """Return the number of steps so far."""
        return [self._num_steps]

    def restore(self, state: Sequence[int]) -> None:
        """Move to the position after a number of steps."""
        (self._num_steps,) = state
        self._batches = None


def shuffled_batches(count: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of indices below `count` endlessly, in a new random order in each epoch.

    An epoch contains every index once, in batches of similar sizes up to `batch_size`.
    """
    num_batches = -(-count // batch_size)
    for epoch in naturals():
        order = np.random.default_rng([seed, epoch]).permutation(count)
        yield from (batch.tolist() for batch in np.array_split(order, num_batches))


@dataclass(kw_only=True)
class PackedStream:
    """A task stream of the packed rows of a plan.

    Attributes:
        num_workers: number of data loader workers.
        additional_losses: losses of the micro-batches in addition to one for each task.
    """

    plan: Plan
    collate: Collate
    slicing: Slicing
    num_workers: int = 0
    name: str = "pretraining"
    additional_losses: tuple[LossName, ...] = ()
    _position: Position = field(default_factory=Position)
    _steps: Iterator[tuple[list[MicroBatch], Position]] | None = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks whose heads the stream trains."""
        if self.plan.settings.sentence_task == "pairs":
            return ("sentence-order",)
        if self.plan.settings.sentence_task == "none":
            return ("fill-mask",)
        return ("fill-mask", "sentence-order")

    @property
    def losses(self) -> tuple[LossName, ...]:
        """One loss for each task, and the additional losses."""
        return (*self.tasks, *self.additional_losses)

    def step(self) -> Sequence[MicroBatch]:
        """Return this process' micro-batches of the next step."""
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
        """Return the epoch, window and row of the next step."""
        return list(self._position)

    def restore(self, state: Sequence[int]) -> None:
        """Move to a saved epoch, window and row."""
        self._position = Position(*state)
        self._steps = None


def example_stream(
    task: Task,
    examples: Sequence[TokenisedExample],
    config: AlbertConfig,
    *,
    batch_size: int,
    seed: int,
    division: Division = UNDIVIDED,
) -> ExampleStream[TokenisedExample]:
    """Return the task stream of examples, packed into rows of the length that costs least."""
    batches = islice(shuffled_batches(len(examples), batch_size, seed), NUM_SAMPLED_BATCHES)
    return ExampleStream(
        task=task,
        examples=examples,
        batch_size=batch_size,
        row_length=best_row_length(
            [np.array([len(examples[index].ids) for index in batch]) for batch in batches],
            longest=max(len(example.ids) for example in examples),
            config=config,
        ),
        seed=seed,
        division=division,
    )
