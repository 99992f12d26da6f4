"""Continued pretraining in a finetuning run: masked tokens and sentence order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from training.data.examples import SentenceTask
from training.data.preparation import prepare
from training.data.streams import PackedStream
from training.errors import RunError
from training.finetuning.config import FinetuneConfig
from training.finetuning.data import loss_function
from training.finetuning.start import Start
from training.loop.distributed import World, main_first
from training.losses import LossFunction
from training.order_losses import order_loss
from training.pretraining.recipes import RECIPES
from training.pretraining.text_streams import TextStreams

# Fraction of the tokens that is predicted, the paper's.
_MASK_RATE: Final = RECIPES["paper"].mask_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinuedPretraining:
    """The text of `--pretraining` in a run.

    Attributes:
        streams: of masked rows and, with `--order-share`, of pairs in both orders.
        losses: the loss functions, by the names of the streams' micro-batches.
    """

    name: ClassVar[str] = "pretraining"
    streams: Sequence[PackedStream]
    losses: Mapping[str, LossFunction]

    @classmethod
    def read(cls, config: FinetuneConfig, start: Start, world: World, batch_size: int) -> Self:
        """Open the text, which is prepared if need be.

        Args:
            batch_size: packed rows of a step on masked tokens, over all processes.

        Raises:
            CorpusError, ShardError: the text cannot be read or prepared.
            RunError: the rows cannot be divided among the processes.
        """
        rows_option = f"--batch-size {batch_size} of pretraining"
        if batch_size % world.size:  # before text is prepared, which takes long
            raise RunError(f"{rows_option} is no multiple of the {world.size} processes")
        with main_first(world):
            shards = prepare(
                config.pretraining, start.folder / "tokenizer.json", config.output / "shards"
            )
        recipe = RECIPES["small"]
        text = TextStreams(
            shards=shards,
            tokenizer=start.tokenizer,
            world=world,
            num_rows=batch_size,
            length=config.length,
            tokens_a_batch=(config.micro_batch_size or batch_size) * config.length,
            sentence_task=_sentence_task(config, start),
            short_rate=recipe.short_rate,
            mask_rate=_MASK_RATE if config.mask_rate is None else config.mask_rate,
            seed=config.seed,
            rows_option=rows_option,
        )
        losses = {cls.name: loss_function(cls.name, start)}
        if not config.order_share:
            return cls(streams=(text.masked(),), losses=losses)
        short_rate = config.order_short_rate
        pairs = text.pairs(
            length=config.order_length,
            max_positions=start.architecture.max_positions,
            short_rate=recipe.short_rate if short_rate is None else short_rate,
            min_sentences=config.order_sentences or recipe.order_sentences,
        )
        losses["sentence-order"] = order_loss(compiles=start.compiles)
        return cls(streams=(text.masked(), pairs), losses=losses)


def _sentence_task(config: FinetuneConfig, start: Start) -> SentenceTask:
    """Return the checkpoint's sentence task; "none" if other steps learn sentence order."""
    if config.order_share:
        return "none"
    return "nsp" if start.hf.get("albert_sentence_task") == "nsp" else "sop"
