"""Continued pretraining in a finetuning run: masked tokens and sentence order."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from training.data.examples import MIN_LENGTH, SentenceTask
from training.data.mask_rate import MaskRates
from training.data.streams import PackedStream
from training.finetuning.data import DataContext
from training.finetuning.settings import FinetuneSettings
from training.loop.distributed import main_first
from training.loop.progress import RunError
from training.model.checkpoint import read_config
from training.prepare import prepare
from training.run.recipes import RECIPES
from training.run.text_streams import TextStreams

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
    rows_option = f"--batch-size {num_rows} of pretraining"
    if num_rows % world.size:  # before text is prepared, which takes long
        raise RunError(f"{rows_option} is no multiple of the {world.size} processes")
    with main_first(world):
        shards = prepare(
            settings.pretraining, context.start / "tokenizer.json", settings.output / "shards"
        )
    recipe = RECIPES["small"]
    streams = TextStreams(
        shards=shards,
        tokenizer=context.tokenizer,
        world=world,
        num_rows=num_rows,
        length=settings.length,
        tokens_a_batch=(settings.micro_batch_size or num_rows) * settings.length,
        sentence_task=_sentence_task(settings, context.start),
        short_rate=recipe.short_rate,
        mask_rate=mask_rates(settings).highest,
        seed=settings.seed,
        rows_option=rows_option,
    )
    if not settings.order_share:
        return [streams.masked()]
    short_rate = settings.order_short_rate
    pairs = streams.pairs(
        length=settings.order_length,
        max_positions=context.architecture.max_positions,
        short_rate=recipe.short_rate if short_rate is None else short_rate,
        min_sentences=settings.order_sentences or recipe.order_sentences,
    )
    return [streams.masked(), pairs]


def _sentence_task(settings: FinetuneSettings, start: Path) -> SentenceTask:
    """Return that of the checkpoint's pretraining; none beside steps that learn sentence order."""
    if settings.order_share:
        return "none"
    return "nsp" if read_config(start).get("albert_sentence_task") == "nsp" else "sop"
