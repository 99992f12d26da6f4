"""Collation of pretraining batches: packed rows of masked tokens, prefetched by a data loader.

Shape legend: N tokens of a sequence.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.data.batch import MicroBatch, PretrainBatch
from training.data.examples import IGNORED, Example
from training.data.masking import NgramMasking
from training.data.packing import MAX_IN_ROW, Plan, PlannedStep, Position
from training.data.shards import Shards
from training.errors import TrainingError
from training.model.albert import Batch, Packing
from training.system.signals import STOPPING

Rows: TypeAlias = Sequence[Sequence[Example]]
# Collate function: from the examples of each row to a batch.
Collate: TypeAlias = Callable[[Rows], MicroBatch]
# Numbers of predictions are rounded up to a multiple, so that compiled code meets few shapes.
_ROUNDING: Final = 64


class ReadExample(NamedTuple):
    """An example and its tokens, unmasked.

    Attributes:
        ids: (N,).
        second: position of the second segment; N if there is none.
    """

    example: Example
    ids: NDArray[np.int64]
    second: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Collator:
    """Collates examples into batches: reads their tokens, masks and packs them."""

    shards: Shards
    masking: NgramMasking
    length: int
    seed: int

    def __call__(self, rows: Rows) -> PretrainBatch:
        """Collate rows of examples into a batch."""
        return self.batch(self.read(rows))

    def read(self, rows: Rows) -> list[list[ReadExample]]:
        """Read the tokens of rows of examples."""
        parts = self.shards.parts
        return [
            [ReadExample(example, *example.tokens(parts[example.part])) for example in row]
            for row in rows
        ]

    def batch(self, rows: Sequence[Sequence[ReadExample]]) -> PretrainBatch:
        """Mask and pack rows of examples that were read."""
        shape = (len(rows), self.length)
        ids, types, positions = (np.zeros(shape, np.int64) for _ in range(3))
        sequences = np.full(shape, -1, np.int64)
        sequence_lists = _SequenceLists()
        for line, row in enumerate(rows):
            begin = 0
            for number, (example, whole, second) in enumerate(row):
                masked, chosen = self.masking(whole, example.mask_rng(self.seed))
                end = begin + len(whole)
                ids[line, begin:end] = masked
                types[line, begin + second : end] = 1
                positions[line, begin:end] = np.arange(len(whole))
                sequences[line, begin:end] = number
                offset = line * self.length + begin
                sequence_lists.add(offset, len(whole), whole, chosen, example.label)
                begin = end
            if begin < self.length:
                sequence_lists.bounds.append(line * self.length + begin)
        return sequence_lists.batch(ids, types, positions, sequences)


class _SequenceLists:
    """Bounds, labels and targets, gathered over the sequences of a batch."""

    def __init__(self) -> None:
        self.bounds: list[int] = []
        self._firsts: list[int] = []
        self._labels: list[int] = []
        self._rows: list[NDArray[np.int64]] = []
        self._targets: list[NDArray[np.int64]] = []
        self._num_tokens = 0

    def add(
        self,
        begin: int,
        size: int,
        whole: NDArray[np.int64],
        chosen: NDArray[np.int64],
        label: int,
    ) -> None:
        self.bounds.append(begin)
        self._firsts.append(begin)
        self._labels.append(label)
        self._rows.append(begin + chosen)
        self._targets.append(whole[chosen])
        self._num_tokens += size

    def batch(
        self,
        ids: NDArray[np.int64],
        types: NDArray[np.int64],
        positions: NDArray[np.int64],
        sequences: NDArray[np.int64],
    ) -> PretrainBatch:
        rows, targets = np.concatenate(self._rows), np.concatenate(self._targets)
        num_bounds = MAX_IN_ROW * len(ids) + 1
        packing = Packing(
            positions=torch.from_numpy(positions),
            sequences=torch.from_numpy(sequences),
            bounds=_filled(np.array(self.bounds), num_bounds, ids.size).int(),
        )
        return PretrainBatch(
            tokens=Batch(ids=torch.from_numpy(ids), types=torch.from_numpy(types), packing=packing),
            rows=_rounded(rows, 0),
            targets=_rounded(targets, IGNORED),
            firsts=_rounded(np.array(self._firsts), 0),
            labels=_rounded(np.array(self._labels), IGNORED),
            num_tokens=self._num_tokens,
            counts={
                "fill-mask": len(rows),
                "sentence-order": sum(label != IGNORED for label in self._labels),
            },
        )


def _rounded(values: NDArray[np.int64], filler: int) -> Tensor:
    return _filled(values, -(-len(values) // _ROUNDING) * _ROUNDING, filler)


def _filled(values: NDArray[np.int64], size: int, filler: int) -> Tensor:
    whole = np.full(size, filler, np.int64)
    whole[: len(values)] = values
    return torch.from_numpy(whole)


class _Batches(Dataset[tuple[MicroBatch, Position]]):
    """Dataset that a data loader worker collates from a plan."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __getitem__(self, planned: PlannedStep) -> tuple[MicroBatch, Position]:
        return self._collate(planned.rows), planned.next


@dataclass(frozen=True, kw_only=True, slots=True)
class Slicing:
    """Division of a step's rows into micro-batches and among processes.

    Attributes:
        num_rows: rows per step, over all processes.
        rows_a_batch: rows per micro-batch.
        rank: of this process, which takes every `world_size`-th micro-batch.

    Raises:
        TrainingError: the rows are not divisible.
    """

    num_rows: int
    rows_a_batch: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.num_rows % (self.rows_a_batch * self.world_size):
            raise TrainingError(
                f"{self.num_rows} rows do not divide into batches of {self.rows_a_batch} in "
                f"{self.world_size} processes"
            )

    @property
    def num_batches(self) -> int:
        """Micro-batches of this process in a step."""
        return self.num_rows // (self.rows_a_batch * self.world_size)


def _planned(plan: Plan, slicing: Slicing, start: Position) -> Iterator[PlannedStep]:
    """Yield this process' micro-batches of each step, as parts of the step."""
    size = slicing.rows_a_batch
    for step in plan.steps(slicing.num_rows, start):
        for begin in range(slicing.rank * size, slicing.num_rows, slicing.world_size * size):
            yield PlannedStep(step.rows[begin : begin + size], step.next)


def _ignore_stop_signals(worker: int) -> None:
    """Ignore signals in a worker: the run stops after its current step, which needs the batch."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def load_steps(
    plan: Plan, collate: Collate, slicing: Slicing, start: Position, *, num_workers: int
) -> Iterator[tuple[list[MicroBatch], Position]]:
    """Yield this process' micro-batches of each step, and the position of the next step.

    Args:
        num_workers: number of data loader workers; with 0, batches are collated in this process.
    """
    loader: DataLoader[tuple[MicroBatch, Position]] = DataLoader(
        _Batches(collate),
        batch_size=None,
        sampler=_planned(plan, slicing, start),
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        worker_init_fn=_ignore_stop_signals if num_workers else None,
        # Forked workers share the memory-mapped corpus; other start methods would copy it.
        multiprocessing_context="fork" if num_workers else None,
    )
    batches = iter(loader)
    while True:
        step = [next(batches) for _ in range(slicing.num_batches)]
        yield [batch for batch, _ in step], step[-1][1]
