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

# Number of batches from which the length of packed rows is chosen.
BATCHES_SAMPLED: Final = 50
# Enough for fast products of matrices.
_TOKENS_A_PASS: Final = 1024
# Rows of examples of like lengths have a multiple of this length.
_ROW_MULTIPLE: Final = 16
_ExampleT = TypeVar("_ExampleT")


class TaskStream(Protocol):
    """An endless task stream: the micro-batches of each step, determined by the seed."""

    @property
    def name(self) -> str:
        """The name, unique among a run's task streams."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks whose heads it trains."""

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of its micro-batches: the tasks', and additional ones."""

    def step(self) -> Sequence[MicroBatch]:
        """Return this process' micro-batches of the next step."""

    def state(self) -> list[int]:
        """Return the position of the next step."""

    def restore(self, state: Sequence[int]) -> None:
        """Move to a saved position, forwards or backwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Division of a step's examples into micro-batches and among processes.

    The loss is the mean over all of them, whichever process has them.

    Attributes:
        micro_batch_size: maximum number of examples of a micro-batch; None for one micro-batch a
            process.
        rank: of this process, which takes every `world_size`-th micro-batch.
        by_length: whether examples of like lengths are a micro-batch, in rows no longer than they
            need. Attention by plain products, as on a CPU, takes the square of a row's length.
    """

    micro_batch_size: int | None = None
    rank: int = 0
    world_size: int = 1
    by_length: bool = False

    def parts(
        self, examples: Sequence[_ExampleT], size_of: Callable[[_ExampleT], int]
    ) -> list[Sequence[_ExampleT]]:
        """Return the examples in parts of like sums of sizes, at least one for each process."""
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
        """Yield a part's examples in those that go through the model together."""
        if not self.by_length:
            yield examples
            return
        ordered = sorted(examples, key=size_of, reverse=True)
        sizes = np.array([size_of(example) for example in ordered])
        num_passes = max(1, int(sizes.sum()) // _TOKENS_A_PASS)
        pass_of = (np.cumsum(sizes) - sizes / 2) * num_passes // sizes.sum()
        for number in np.unique(pass_of):
            yield [ordered[index] for index in np.flatnonzero(pass_of == number)]

    def row_length(self, sizes: Iterable[int], most: int) -> int:
        """Return the length of the rows of a micro-batch with examples of these sizes."""
        if not self.by_length:
            return most
        return shortest_row_length(max(sizes), most=most, multiple=_ROW_MULTIPLE)

    @property
    def own(self) -> slice:
        """The micro-batches of this process among all of a step."""
        return slice(self.rank, None, self.world_size)


# A step in one process, as one micro-batch.
WHOLE: Final = Division()


@dataclass(kw_only=True)
class ExampleStream(Generic[_ExampleT]):
    """Task stream over the examples of one task, `batch_size` a step, each once an epoch.

    Attributes:
        row_length: maximum tokens of the rows that examples are packed into.
        division: of a step's examples; the others' shares are skipped.
    """

    task: Task
    examples: Sequence[_ExampleT]
    batch_size: int
    row_length: int
    seed: int
    division: Division = WHOLE
    _num_taken: int = 0
    _batches: Iterator[list[int]] | None = None

    def __post_init__(self) -> None:
        if not self.examples:
            raise TrainingError(f"{self.task} has no examples to train on")
        smallest = len(self.examples) // self.steps_an_epoch
        if smallest < self.division.world_size:
            raise TrainingError(
                f"--batch-size {self.batch_size} of {self.task} has {smallest} of "
                f"{len(self.examples):,} examples in a step; each of the "
                f"{self.division.world_size} processes needs one"
            )

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task

    @property
    def steps_an_epoch(self) -> int:
        """Steps in which every example is read once."""
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
        """Return this process' share of the next examples as micro-batches."""
        if self._batches is None:
            batches = shuffled_batches(len(self.examples), self.batch_size, self.seed)
            self._batches = islice(batches, self._num_taken, None)
        self._num_taken += 1
        examples = [self.examples[index] for index in next(self._batches)]
        parts = self.division.parts(examples, self.size_of)
        passes = [passed for part in parts for passed in self.passes(part)]
        return [self.collate(passed) for passed in passes[self.division.own]]

    def size_of(self, example: Any) -> int:
        """Return the tokens of an example's sequences."""
        return sum(example.lengths)

    def passes(self, examples: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Return examples in the parts that go through the model together."""
        return list(self.division.passes(examples, self.size_of))

    def collate(self, examples: Sequence[Any]) -> MicroBatch:
        """Return examples as one micro-batch."""
        sizes = chain.from_iterable(example.lengths for example in examples)
        return self.pack(examples, self.division.row_length(sizes, self.row_length))

    def pack(self, examples: Sequence[Any], row_length: int) -> MicroBatch:
        """Return examples as one micro-batch in rows of this length."""
        return collate_examples(self.task, examples, row_length=row_length)

    def state(self) -> list[int]:
        """Return the number of steps taken so far."""
        return [self._num_taken]

    def restore(self, state: Sequence[int]) -> None:
        """Skip the steps taken before."""
        (self._num_taken,) = state
        self._batches = None


def shuffled_batches(count: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of indices below `count` without end; each epoch is another permutation.

    An epoch has every index once, in batches of like sizes, at most `batch_size`.
    """
    num_batches = -(-count // batch_size)
    for epoch in naturals():
        order = np.random.default_rng([seed, epoch]).permutation(count)
        yield from (batch.tolist() for batch in np.array_split(order, num_batches))


@dataclass(kw_only=True)
class PackedStream:
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
        if self.plan.settings.sentence_task == "pairs":
            return ("sentence-order",)
        if self.plan.settings.sentence_task == "none":
            return ("fill-mask",)
        return ("fill-mask", "sentence-order")

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of its tasks, and the further ones."""
        return (*self.tasks, *self.further_losses)

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
        """Return epoch, window and row of the next step."""
        return list(self._position)

    def restore(self, state: Sequence[int]) -> None:
        """Move to that epoch, window and row."""
        self._position = Position(*state)
        self._steps = None


def example_stream(
    task: Task,
    examples: Sequence[TokenisedExample],
    config: AlbertConfig,
    *,
    batch_size: int,
    seed: int,
    division: Division = WHOLE,
) -> ExampleStream[TokenisedExample]:
    """Return the task stream of examples, packed into rows of the length that costs least."""
    batches = islice(shuffled_batches(len(examples), batch_size, seed), BATCHES_SAMPLED)
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
