"""Task streams over plain text: masked tokens, and sentence order from pairs in both orders.

Shape legend: C pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import MicroBatch
from training.data.collate import Collator, PackedRows, Rows, Slicing, rounded
from training.data.examples import IGNORED, ExampleSettings, SentenceTask
from training.data.masking import NgramMasking
from training.data.packing import Plan
from training.data.shards import Shards
from training.data.streams import PackedStream
from training.errors import RunError
from training.loop.distributed import World

# Default maximum number of tokens in a pair.
_ORDER_LENGTH: Final = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderBatch(MicroBatch):
    """A micro-batch of pairs without masks: all pairs in order, then all pairs swapped.

    A pair has the same content in both orders. Comparing the two therefore teaches order, and not
    which content usually comes first.

    Attributes:
        firsts: (2 C,) position of each sequence's [CLS], as an index into the flattened tokens.
        labels: (2 C,) 0 if in order, 1 if swapped, or IGNORED in the entries that pad C.
    """

    task: str = "sentence-order"
    firsts: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderCollator:
    """A function that collates rows of `pairs` examples into a batch with twice as many rows."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TextStreams:
    """The task streams of a run on plain text.

    Attributes:
        num_rows: number of masked rows, of `length` tokens each, per step of all processes.
        max_batch_tokens: maximum number of tokens in a micro-batch, unless a single row has more.
        short_rate: fraction of the documents that are cut into shorter examples.
        rows_option: option for `num_rows` and its value, for messages.
    """

    shards: Shards
    tokenizer: AlbertTokenizer
    world: World
    num_rows: int
    length: int
    max_batch_tokens: int
    sentence_task: SentenceTask
    short_rate: float
    mask_rate: float
    seed: int
    rows_option: str
    num_workers: int = 0

    @property
    def examples(self) -> ExampleSettings:
        """The settings of the examples of masked rows."""
        return ExampleSettings(
            length=self.length, sentence_task=self.sentence_task, short_rate=self.short_rate
        )

    @property
    def collator(self) -> Collator:
        """The collate function of masked rows."""
        return Collator(
            shards=self.shards,
            masking=NgramMasking.of(self.tokenizer, self.mask_rate),
            length=self.length,
            seed=self.seed,
            has_labels=self.sentence_task != "none",
        )

    def masked(self) -> PackedStream:
        """Return the task stream of masked rows."""
        return PackedStream(
            plan=Plan(shards=self.shards, settings=self.examples, seed=self.seed),
            collate=self.collator,
            slicing=self._slice(self.num_rows, self.length, self.rows_option),
            num_workers=self.num_workers,
        )

    def pairs(
        self,
        *,
        length: int | None,
        max_positions: int,
        short_rate: float,
        min_sentences: int,
        num_rows: int | None = None,
    ) -> PackedStream:
        """Return the task stream of pairs in both orders.

        Args:
            length: maximum number of tokens in a pair (default: 512, or `max_positions` if less).
            max_positions: number of positions of the model.
            short_rate: fraction of the documents that are cut into shorter pairs.
            min_sentences: minimum number of sentences in each segment.
            num_rows: number of rows per step of all processes. None means about as many tokens as
                in the masked rows.
        """
        length = length or min(_ORDER_LENGTH, max_positions)
        settings = ExampleSettings(
            length=length,
            sentence_task="pairs",
            short_rate=short_rate,
            min_sentences=min_sentences,
        )
        size = self.world.size
        rows = num_rows or max(1, self.num_rows * self.length // (2 * length) // size) * size
        return PackedStream(
            plan=Plan(shards=self.shards, settings=settings, seed=self.seed),
            collate=OrderCollator(shards=self.shards, length=length),
            slicing=self._slice(rows, 2 * length, f"--order-batch-size {rows}"),
            num_workers=self.num_workers,
            name="sentence-order",
            additional_losses=("paired-order",),
        )

    def _slice(self, num_rows: int, row_length: int, option: str) -> Slicing:
        """Divide a step's rows into the largest micro-batches that fit."""
        size = self.world.size
        if num_rows % size:
            raise RunError(f"{option} is not a multiple of the number of processes ({size}).")
        process_rows, max_rows = num_rows // size, max(1, self.max_batch_tokens // row_length)
        return Slicing(
            num_rows=num_rows,
            rows_per_batch=max(
                rows
                for rows in range(1, min(process_rows, max_rows) + 1)
                if process_rows % rows == 0
            ),
            rank=self.world.rank,
            world_size=size,
        )
