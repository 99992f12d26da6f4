"""Task streams over plain text: masked tokens, and sentence order from pairs in both orders."""

from __future__ import annotations

from typing import Final

from albert_serve.tokenizer import AlbertTokenizer
from training.data.collate import Collator, Slicing
from training.data.examples import ExampleSettings
from training.data.masking import NgramMasking, word_starts
from training.data.order import order_stream
from training.data.shards import Shards
from training.data.streams import PackedStream
from training.loop.distributed import World
from training.loop.progress import RunError

# Maximum tokens of a pair in both orders, where neither options nor the model have less.
_ORDER_LENGTH: Final = 512


def masking_collator(
    shards: Shards,
    tokenizer: AlbertTokenizer,
    settings: ExampleSettings,
    *,
    mask_rate: float,
    seed: int,
) -> Collator:
    """Return the collate function of masked rows."""
    return Collator(
        shards=shards,
        masking=NgramMasking(word_starts=word_starts(tokenizer), rate=mask_rate),
        length=settings.length,
        seed=seed,
        has_labels=settings.sentence_task != "none",
    )


def pair_stream(
    shards: Shards,
    settings: ExampleSettings,
    world: World,
    *,
    num_rows: int | None,
    tokens_a_step: int,
    tokens_a_batch: int,
    seed: int,
    num_workers: int = 0,
) -> PackedStream:
    """Return the task stream of pairs in both orders.

    Args:
        settings: of `pairs`.
        num_rows: rows per step; None for about `tokens_a_step`, divisible by the processes.
        tokens_a_batch: maximum tokens of a micro-batch.

    Raises:
        RunError: the rows cannot be divided among the processes.
    """
    row_length = 2 * settings.length
    rows = num_rows or max(1, tokens_a_step // row_length // world.size) * world.size
    slicing = slice_rows(rows, row_length, tokens_a_batch, world, f"--order-batch-size {rows}")
    return order_stream(shards, settings, slicing, seed=seed, num_workers=num_workers)


def pair_length(order_length: int | None, max_positions: int) -> int:
    """Return the maximum tokens of a pair in both orders."""
    return order_length or min(_ORDER_LENGTH, max_positions)


def slice_rows(
    num_rows: int, row_length: int, tokens_a_batch: int, world: World, given: str
) -> Slicing:
    """Divide a step's rows into micro-batches: the largest divisor of a process' rows that fits.

    Args:
        row_length: tokens of a row; of pairs in both orders, twice those of a pair.
        tokens_a_batch: maximum tokens of a micro-batch, which has one row at least.
        given: the option of the rows with its value, for the error.

    Raises:
        RunError: the rows cannot be divided among the processes.
    """
    if num_rows % world.size:
        raise RunError(f"{given} is no multiple of the {world.size} processes")
    own, most = num_rows // world.size, max(1, tokens_a_batch // row_length)
    return Slicing(
        num_rows=num_rows,
        rows_a_batch=max(rows for rows in range(1, min(own, most) + 1) if own % rows == 0),
        rank=world.rank,
        world_size=world.size,
    )
