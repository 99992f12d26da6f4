"""Collation of sequences and their targets into packed rows, which a data loader prefetches.

Shape legend: N tokens in a sequence.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from albert_serve.bundle.weights import TOKENS
from training.data.batch import ExampleBatch, LossName, MicroBatch, PretrainBatch, TokenisedExample
from training.data.examples import IGNORED, Example
from training.data.masking import NgramMasking
from training.data.packing import MAX_IN_ROW, Plan, PlannedStep, Position, pack
from training.data.shards import Shards
from training.errors import TrainingError
from training.model.albert import ModelInputs, Packing
from training.model.heads import Task
from training.system.process import STOPPING

Rows: TypeAlias = Sequence[Sequence[Example]]
# Function that makes a batch from the examples of each row.
Collate: TypeAlias = Callable[[Rows], MicroBatch]
# Predictions are padded to a multiple of this number, so that torch compiles code for few shapes.
_ROUNDING: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Collator:
    """A function that reads, masks and packs the tokens of examples into a batch.

    Attributes:
        length: number of tokens in a row.
        has_labels: whether there is a sentence task. If not, batches contain no count for it, and
            its head is not computed.
    """

    shards: Shards
    masking: NgramMasking
    length: int
    seed: int
    has_labels: bool = True

    def __call__(self, rows: Rows) -> PretrainBatch:
        """Collate rows of examples into a batch."""
        packed = PackedRows(len(rows), self.length)
        positions: list[NDArray[np.int64]] = []
        targets: list[NDArray[np.int64]] = []
        labels: list[int] = []
        for line, row in enumerate(rows):
            for example in row:
                ids, second = example.tokens(self.shards.parts[example.part])
                masked_ids, masked = self.masking(ids, example.mask_rng(self.seed))
                types = (np.arange(len(ids)) >= second).astype(np.int64)
                positions.append(packed.add(line, masked_ids, types) + masked)
                targets.append(ids[masked])
                labels.append(example.label)
        return PretrainBatch(
            tokens=packed.batch(),
            rows=rounded(np.concatenate(positions), 0),
            targets=rounded(np.concatenate(targets), IGNORED),
            firsts=rounded(np.array(packed.firsts), 0),
            labels=rounded(np.array(labels), IGNORED),
            num_tokens=packed.num_tokens,
            counts=self._counts(sum(map(len, positions)), labels),
        )

    def _counts(self, num_masked: int, labels: Sequence[int]) -> dict[LossName, int]:
        counts = {"fill-mask": num_masked}
        if self.has_labels:
            counts["sentence-order"] = sum(label != IGNORED for label in labels)
        return counts


class PackedRows:
    """Rows of tokens that are filled sequence by sequence.

    Attributes:
        firsts: position of each sequence's first token, as an index into the flattened tokens.
    """

    def __init__(self, num_rows: int, length: int) -> None:
        shape = (num_rows, length)
        self.firsts: list[int] = []
        self._ids, self._types, self._positions = (np.zeros(shape, np.int64) for _ in range(3))
        self._sequences = np.full(shape, -1, np.int64)
        self._used = np.zeros(num_rows, np.int64)
        self._counts = np.zeros(num_rows, np.int64)

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self._used.sum())

    def add(self, line: int, ids: ArrayLike, types: ArrayLike) -> int:
        """Append a sequence (N,) to a row, and return the flat index of its first token."""
        begin, size = int(self._used[line]), np.size(ids)
        span = slice(begin, begin + size)
        self._ids[line, span] = ids
        self._types[line, span] = types
        self._positions[line, span] = np.arange(size)
        self._sequences[line, span] = self._counts[line]
        self._used[line] += size
        self._counts[line] += 1
        self.firsts.append(line * self._ids.shape[1] + begin)
        return self.firsts[-1]

    def batch(self) -> ModelInputs:
        """Return the rows as a batch."""
        num_rows, length = self._ids.shape
        padded = np.flatnonzero(self._used < length)
        bounds = np.sort(np.concatenate([self.firsts, padded * length + self._used[padded]]))
        packing = Packing(
            positions=torch.from_numpy(self._positions),
            sequences=torch.from_numpy(self._sequences),
            bounds=_filled(bounds, MAX_IN_ROW * num_rows + 1, num_rows * length).int(),
        )
        return ModelInputs(
            ids=torch.from_numpy(self._ids),
            types=torch.from_numpy(self._types),
            packing=packing,
        )


def collate_examples(
    task: Task, examples: Sequence[TokenisedExample], *, row_length: int
) -> ExampleBatch:
    """Pack a task's examples, each of at most `row_length` tokens, into rows by best fit."""
    row_of = pack(np.array([len(example.ids) for example in examples]), row_length)
    packed = PackedRows(int(row_of.max()) + 1, row_length)
    firsts = [
        packed.add(line, example.ids, example.types)
        for line, example in zip(row_of.tolist(), examples, strict=True)
    ]
    all_targets = [torch.as_tensor(example.target) for example in examples]
    is_tagged = task == TOKENS
    targets = pad_sequence(all_targets, True, IGNORED) if is_tagged else torch.stack(all_targets)
    return ExampleBatch(
        task=task,
        tokens=packed.batch(),
        num_tokens=packed.num_tokens,
        counts={task: int((targets != IGNORED).sum()) if is_tagged else len(examples)},
        firsts=torch.tensor(firsts),
        sizes=torch.tensor([len(example.ids) for example in examples]),
        targets=targets,
    )


def rounded(values: NDArray[Any], filler: int) -> Tensor:
    """Pad the last dimension to a multiple of 64, so that torch compiles code for few shapes."""
    return _filled(values, -(-values.shape[-1] // _ROUNDING) * _ROUNDING, filler)


def _filled(values: NDArray[Any], size: int, filler: int) -> Tensor:
    filled = np.full((*values.shape[:-1], size), filler, values.dtype)
    filled[..., : values.shape[-1]] = values
    return torch.from_numpy(filled)


class _Batches(Dataset[tuple[MicroBatch, Position]]):
    """A dataset for the data loader, whose items are collated from planned steps."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __getitem__(self, planned: PlannedStep) -> tuple[MicroBatch, Position]:
        return self._collate(planned.rows), planned.next


@dataclass(frozen=True, kw_only=True, slots=True)
class Slicing:
    """Division of a step's rows into micro-batches and among processes.

    Each process takes every `world_size`-th micro-batch, starting with number `rank`.
    """

    num_rows: int
    rows_per_batch: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.num_rows % (self.rows_per_batch * self.world_size):
            raise TrainingError(
                f"{self.num_rows} rows do not divide into batches of {self.rows_per_batch} in "
                f"{self.world_size} processes."
            )

    @property
    def num_batches(self) -> int:
        """Number of micro-batches of this process in a step."""
        return self.num_rows // (self.rows_per_batch * self.world_size)


def _planned(plan: Plan, slicing: Slicing, start: Position) -> Iterator[PlannedStep]:
    """Yield each micro-batch of this process, as a part of its step."""
    size = slicing.rows_per_batch
    for step in plan.steps(slicing.num_rows, start):
        for begin in range(slicing.rank * size, slicing.num_rows, slicing.world_size * size):
            yield PlannedStep(step.rows[begin : begin + size], step.next)


def _ignore_stop_signals(worker: int) -> None:
    """Ignore stop signals in a worker, because the run needs its batches to complete a step."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def load_steps(
    plan: Plan, collate: Collate, slicing: Slicing, start: Position, *, num_workers: int
) -> Iterator[tuple[list[MicroBatch], Position]]:
    """Yield this process' micro-batches of each step, and the position of the next step."""
    loader: DataLoader[tuple[MicroBatch, Position]] = DataLoader(
        _Batches(collate),
        batch_size=None,
        sampler=_planned(plan, slicing, start),
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        worker_init_fn=_ignore_stop_signals if num_workers else None,
        # Forked workers share the memory-mapped corpus. Other start methods would copy it.
        multiprocessing_context="fork" if num_workers else None,
    )
    batches = iter(loader)
    while True:
        step = [next(batches) for _ in range(slicing.num_batches)]
        yield [batch for batch, _ in step], step[-1][1]
