"""Collation of pretraining batches: packed rows of masked tokens, prefetched by a data loader.

Shape legend: B rows, S positions, R tokens to predict, C sequences.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.data.examples import IGNORED, Example
from training.data.masking import NgramMasking
from training.data.packing import MAX_IN_ROW, Plan, Position
from training.data.shards import Shards
from training.errors import TrainingError
from training.model.albert import Batch, Packing, move
from training.signals import STOPPING

Made = TypeVar("Made")
# Collate function: from the examples of each row to a batch.
Collate: TypeAlias = Callable[[Sequence[Sequence[Example]]], Made]
# Numbers of predictions are rounded up to a multiple, so that compiled code meets few shapes.
_ROUNDING: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainBatch:
    """A micro-batch of pretraining.

    Attributes:
        tokens: ids (B, S), masked.
        rows: (R,) positions of the tokens to predict, as indices into the flattened (B * S).
        targets: (R,) the original ids; IGNORED where R was rounded up.
        firsts: (C,) positions of each sequence's [CLS], as indices into the flattened (B * S).
        labels: (C,) of the sentence task, or IGNORED.
        num_tokens: real tokens.
        num_masked: tokens to predict.
        num_pairs: sequences with a label.
    """

    tokens: Batch
    rows: Tensor
    targets: Tensor
    firsts: Tensor
    labels: Tensor
    num_tokens: int
    num_masked: int
    num_pairs: int

    def to(self, device: torch.device) -> PretrainBatch:
        """Return the batch on another device."""
        return move(self, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collator:
    """Collates examples into batches: reads their tokens, masks and packs them."""

    shards: Shards
    masking: NgramMasking
    length: int
    seed: int

    def __call__(self, rows: Sequence[Sequence[Example]]) -> PretrainBatch:
        """Collate rows of examples into a batch."""
        shape = (len(rows), self.length)
        ids, types, positions = (np.zeros(shape, np.int64) for _ in range(3))
        sequences = np.full(shape, -1, np.int64)
        sequence_lists = _SequenceLists()
        for line, row in enumerate(rows):
            begin = 0
            for number, example in enumerate(row):
                whole, second = example.tokens(self.shards.parts[example.part])
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
            num_masked=len(rows),
            num_pairs=sum(label != IGNORED for label in self._labels),
        )


def _rounded(values: NDArray[np.int64], filler: int) -> Tensor:
    return _filled(values, -(-len(values) // _ROUNDING) * _ROUNDING, filler)


def _filled(values: NDArray[np.int64], size: int, filler: int) -> Tensor:
    whole = np.full(size, filler, np.int64)
    whole[: len(values)] = values
    return torch.from_numpy(whole)


@dataclass(frozen=True, slots=True)
class _PlannedBatch:
    rows: list[list[Example]]
    next: Position


@dataclass(frozen=True, slots=True)
class _MadeBatch(Generic[Made]):
    batch: Made
    next: Position


class _Batches(Dataset[_MadeBatch[Made]]):
    """Dataset that a data loader worker collates from a plan."""

    def __init__(self, collate: Collate[Made]) -> None:
        self._collate = collate

    def __getitem__(self, planned: _PlannedBatch) -> _MadeBatch[Made]:
        return _MadeBatch(self._collate(planned.rows), planned.next)


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


def _planned(plan: Plan, slicing: Slicing, start: Position) -> Iterator[_PlannedBatch]:
    size = slicing.rows_a_batch
    for step in plan.steps(slicing.num_rows, start):
        for begin in range(slicing.rank * size, slicing.num_rows, slicing.world_size * size):
            yield _PlannedBatch(step.rows[begin : begin + size], step.next)


def _ignore_stop_signals(worker: int) -> None:
    """Ignore signals in a worker: the run stops after its current step, which needs the batch."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def load_steps(
    plan: Plan, collate: Collate[Made], slicing: Slicing, start: Position, *, num_workers: int
) -> Iterator[tuple[list[Made], Position]]:
    """Yield this process' micro-batches of each step, and the position of the next step.

    Args:
        num_workers: number of data loader workers; with 0, batches are collated in this process.
    """
    loader: DataLoader[_MadeBatch[Made]] = DataLoader(
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
        yield [made.batch for made in step], step[-1].next
