"""Batches of sentence order without masks: each pair of segments in both orders.

Content that says more often than not which segment comes first, whatever their order, is the same
in both orders of a pair, and teaches nothing where both are compared.

Shape legend: C pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from training.data.batch import MicroBatch
from training.data.collate import PackedRows, Rows, Slicing, rounded
from training.data.examples import IGNORED, ExampleSettings
from training.data.packing import Plan
from training.data.shards import Shards
from training.data.streams import PackedStream


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderBatch(MicroBatch):
    """A micro-batch of pairs, unmasked, all in order and then all swapped.

    Attributes:
        firsts: (2 C,) position of each sequence's [CLS], as an index into the flattened tokens.
        labels: (2 C,) 0 in order, 1 swapped; IGNORED where C was rounded up.
    """

    task: str = "sentence-order"
    firsts: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderCollator:
    """Collates rows of examples of `pairs` into a batch of twice as many rows."""

    shards: Shards
    length: int

    def __call__(self, rows: Rows) -> OrderBatch:
        """Collate rows of examples into a batch."""
        packed = PackedRows(2 * len(rows), self.length)
        for swapped in (False, True):
            for line, row in enumerate(rows, start=swapped * len(rows)):
                for example in row:
                    first_begin, first_end, second_begin, second_end = example.bounds
                    if swapped:
                        bounds = (second_begin, second_end, first_begin, first_end)
                        example = example._replace(bounds=bounds)
                    ids, second = example.tokens(self.shards.parts[example.part])
                    packed.add(line, ids, np.arange(len(ids)) >= second)
        num_pairs = len(packed.firsts) // 2
        firsts = np.array(packed.firsts).reshape(2, num_pairs)
        labels = np.array([[0] * num_pairs, [1] * num_pairs])
        return OrderBatch(
            tokens=packed.batch(),
            firsts=rounded(firsts, 0).flatten(),
            labels=rounded(labels, IGNORED).flatten(),
            num_tokens=packed.num_tokens,
            counts={"sentence-order": 2 * num_pairs, "paired-order": num_pairs},
        )


def order_stream(
    shards: Shards, settings: ExampleSettings, slicing: Slicing, *, seed: int, num_workers: int = 0
) -> PackedStream:
    """Return the task stream of pairs in both orders; `settings` are those of `pairs`."""
    return PackedStream(
        plan=Plan(shards=shards, settings=settings, seed=seed),
        collate=OrderCollator(shards=shards, length=settings.length),
        slicing=slicing,
        num_workers=num_workers,
        name="sentence-order",
        further_losses=("paired-order",),
    )
