"""Continued pretraining in a finetuning run: masked tokens and sentence order."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from training.data.examples import MIN_LENGTH, ExampleSettings
from training.data.mask_rate import MaskRates
from training.data.packing import Plan
from training.data.streams import PackedStream
from training.finetuning.data import DataContext
from training.finetuning.settings import FinetuneSettings
from training.loop.distributed import main_first
from training.loop.progress import RunError
from training.model.checkpoint import read_config
from training.prepare import prepare
from training.run.recipes import RECIPES
from training.run.text_streams import masking_collator, pair_length, pair_stream, slice_rows

# Fraction of the tokens that is predicted, the paper's.
_MASK_RATE: Final = RECIPES["paper"].mask_rate


def mask_rates(settings: FinetuneSettings) -> MaskRates:
    """Return the rates of `--mask-rate`; the paper's if it is not given."""
    return settings.mask_rates or MaskRates(first=_MASK_RATE, last=_MASK_RATE)


def check_order_length(settings: FinetuneSettings, max_positions: int) -> None:
    """Check the length of pairs in both orders.

    Raises:
        RunError: pairs are longer than the model's positions, or too short.
    """
    if not MIN_LENGTH <= (settings.order_length or MIN_LENGTH) <= max_positions:
        raise RunError(
            f"--order-length {settings.order_length}: a pair has from {MIN_LENGTH} tokens to the "
            f"model's {max_positions} positions"
        )


def pretraining_streams(context: DataContext, num_rows: int) -> list[PackedStream]:
    """Return the task streams of `--pretraining`, whose text is prepared if need be.

    There is a second one, of pairs in both orders, with `--order-share`.

    Args:
        num_rows: packed rows of a step on masked tokens, over all processes.

    Raises:
        CorpusError, ShardError: the text cannot be read or prepared.
        RunError: the rows cannot be divided among the processes.
    """
    settings, world = context.settings, context.world
    length, seed = settings.length, settings.seed
    tokens_a_batch = (settings.micro_batch_size or num_rows) * length
    given = f"--batch-size {num_rows} of pretraining"
    slicing = slice_rows(num_rows, length, tokens_a_batch, world, given)
    with main_first(world):
        shards = prepare(
            settings.pretraining, context.start / "tokenizer.json", settings.output / "shards"
        )
    examples = _example_settings(settings, context.start)
    rate = mask_rates(settings).highest
    masked = PackedStream(
        plan=Plan(shards=shards, settings=examples, seed=seed),
        collate=masking_collator(shards, context.tokenizer, examples, mask_rate=rate, seed=seed),
        slicing=slicing,
    )
    if not settings.order_share:
        return [masked]
    recipe, short_rate = RECIPES["small"], settings.order_short_rate
    pairs = pair_stream(
        shards,
        ExampleSettings(
            length=pair_length(settings.order_length, context.architecture.max_positions),
            sentence_task="pairs",
            short_rate=recipe.short_rate if short_rate is None else short_rate,
            min_sentences=settings.order_sentences or recipe.order_sentences,
        ),
        world,
        num_rows=None,
        tokens_a_step=num_rows * length,
        tokens_a_batch=tokens_a_batch,
        seed=seed,
    )
    return [masked, pairs]


def _example_settings(settings: FinetuneSettings, start: Path) -> ExampleSettings:
    """Return the settings with the sentence task of the checkpoint's pretraining.

    Masked rows have none where steps of their own learn sentence order.
    """
    if settings.order_share:
        return ExampleSettings(length=settings.length, sentence_task="none")
    task = read_config(start).get("albert_sentence_task")
    return ExampleSettings(length=settings.length, sentence_task="nsp" if task == "nsp" else "sop")
