"""Continued pretraining in a finetuning run: masked tokens and sentence order."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from albert_serve.tokenizer import AlbertTokenizer
from training.data.collate import Collator, Slicing
from training.data.corpus import CorpusError, find_errors, find_files
from training.data.examples import MIN_LENGTH, ExampleSettings
from training.data.feeds import PlannedFeed
from training.data.labelled.errors import raise_listed
from training.data.mask_rate import MaskRates
from training.data.masking import NgramMasking, word_starts
from training.data.order import order_feed
from training.data.packing import Plan
from training.data.shards import SHARDS_FILE, Shards
from training.finetuning.seeds import prepared_folder
from training.loop.distributed import World, main_first
from training.loop.progress import RunError
from training.model.checkpoint import read_config
from training.prepare import prepare
from training.run.job import ORDER_LENGTH, rows_a_batch, rows_of_pairs
from training.run.options import (
    add_mask_rate,
    add_order,
    check_order_share,
    mask_rates_of,
    parse_part,
)
from training.run.recipes import RECIPES

# Text up to this size is read for its errors although other data has some.
_CHECKED_BYTES: Final = 64 << 20
# Fraction of the tokens that is predicted, the paper's.
_MASK_RATE: Final = RECIPES["paper"].mask_rate


def add_pretraining(group: argparse._ActionsContainer) -> None:
    """Add the options of continued pretraining."""
    group.add_argument("--pretraining", nargs="+", type=Path, help="text for continued pretraining")
    add_mask_rate(group, default=f"{_MASK_RATE}")
    add_order(group)
    group.add_argument(
        "--order-short-rate",
        type=parse_part,
        help="fraction of the documents cut into pairs of a random shorter length (0.1)",
    )


def mask_rates(options: argparse.Namespace) -> MaskRates:
    """Return the rates of `--mask-rate`; the paper's if it is not given.

    Raises:
        RunError: it is given without a text to mask, or has more than two rates.
    """
    if options.mask_rate is None:
        return mask_rates_of([_MASK_RATE])
    if options.pretraining is None:
        raise RunError("--mask-rate is of the masked rows of --pretraining; give its text")
    return mask_rates_of(options.mask_rate)


def check_order(options: argparse.Namespace, max_positions: int) -> None:
    """Check the options of steps on pairs in both orders.

    Raises:
        RunError: there is no text for them, no step is left to masked tokens, or pairs are longer
            than the model's positions.
    """
    names = ("order_share", "order_length", "order_sentences", "order_short_rate")
    given = [getattr(options, name) for name in names]
    if options.pretraining is None and any(value is not None for value in given):
        raise RunError("--order-share is a fraction of the steps on --pretraining; give its text")
    check_order_share(options.order_share)
    if not MIN_LENGTH <= (options.order_length or MIN_LENGTH) <= max_positions:
        raise RunError(
            f"--order-length {options.order_length}: a pair has from {MIN_LENGTH} tokens to the "
            f"model's {max_positions} positions"
        )


def pretraining_feeds(
    options: argparse.Namespace,
    tokenizer: AlbertTokenizer,
    num_rows: int,
    world: World,
    *,
    max_positions: int,
) -> list[PlannedFeed]:
    """Return the task streams of `--pretraining`, whose text is prepared if need be.

    There is a second one, of pairs in both orders, with `--order-share`.

    Args:
        num_rows: packed rows of a step on masked tokens, over all processes.

    Raises:
        CorpusError, ShardError: the text cannot be read or prepared; all bad lines are listed.
        RunError: the rows cannot be divided among the processes.
    """
    if num_rows % world.size:
        raise RunError(
            f"--batch-size {num_rows} of pretraining is no multiple of the {world.size} processes"
        )
    tokenizer_file = options.initialize_from / "tokenizer.json"
    folder = prepared_folder(options) / "shards"
    with main_first(world):
        try:
            shards = prepare(options.pretraining, tokenizer_file, folder)
        except CorpusError:
            raise_listed(list(find_errors(find_files(options.pretraining))))
            raise
    masking = NgramMasking(word_starts=word_starts(tokenizer), rate=mask_rates(options).highest)
    settings = _example_settings(options)
    num_tokens = (options.micro_batch_size or num_rows) * options.length
    masked = PlannedFeed(
        plan=Plan(shards=shards, settings=settings, seed=options.seed),
        collate=Collator(
            shards=shards,
            masking=masking,
            length=options.length,
            seed=options.seed,
            has_labels=settings.sentence_task != "none",
        ),
        slicing=_slicing(num_rows, options.length, num_tokens, world),
    )
    if not options.order_share:
        return [masked]
    pairs = _order_feed(options, shards, num_rows, num_tokens, world, max_positions)
    return [masked, pairs]


def _order_feed(
    options: argparse.Namespace,
    shards: Shards,
    num_rows: int,
    num_tokens: int,
    world: World,
    max_positions: int,
) -> PlannedFeed:
    length = options.order_length or min(ORDER_LENGTH, max_positions)
    rows = rows_of_pairs(num_rows * options.length, length, world.size)
    recipe, short_rate = RECIPES["small"], options.order_short_rate
    settings = ExampleSettings(
        length=length,
        sentence_task="pairs",
        short_rate=recipe.short_rate if short_rate is None else short_rate,
        min_sentences=options.order_sentences or recipe.order_sentences,
    )
    slicing = _slicing(rows, 2 * length, num_tokens, world)
    return order_feed(shards, settings, slicing, seed=options.seed)


def _slicing(num_rows: int, length: int, num_tokens: int, world: World) -> Slicing:
    """Divide a step's rows into micro-batches of at most `num_tokens`."""
    return Slicing(
        num_rows=num_rows,
        rows_a_batch=rows_a_batch(num_rows // world.size, length, num_tokens),
        rank=world.rank,
        world_size=world.size,
    )


def check_pretraining(options: argparse.Namespace, world: World) -> None:
    """Check the text of `--pretraining` of a run that cannot start because of other data.

    The main process reads up to 64 MiB of it, unless it is prepared already; a large corpus would
    delay the other errors by hours.

    Raises:
        CorpusError: it cannot be read; all of it is listed.
    """
    files = find_files(options.pretraining)
    is_prepared = (prepared_folder(options) / "shards" / SHARDS_FILE).is_file()
    is_small = sum(file.stat().st_size for file in files) <= _CHECKED_BYTES
    if world.is_main and is_small and not is_prepared:
        raise_listed(list(find_errors(files)))


def _example_settings(options: argparse.Namespace) -> ExampleSettings:
    """Return the settings with the sentence task of the checkpoint's pretraining.

    Masked rows have none where steps of their own learn sentence order.
    """
    if options.order_share:
        return ExampleSettings(length=options.length, sentence_task="none")
    task = read_config(options.initialize_from).get("albert_sentence_task")
    return ExampleSettings(length=options.length, sentence_task="nsp" if task == "nsp" else "sop")
