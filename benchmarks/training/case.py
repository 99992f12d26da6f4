"""The pretraining that both sides run: one model on the same examples."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from albert_serve.config import PRESETS, AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.commands.pretrain import PretrainConfig
from training.data.examples import IGNORED, ExampleSettings
from training.data.masking import NgramMasking
from training.data.packing import Plan
from training.data.shards import Shards
from training.loop.distributed import World
from training.loop.step import Run
from training.pretraining.config import Start
from training.pretraining.job import open_job
from training.pretraining.recipes import RECIPES

_SMALL_VOCAB: Final = 12000
_SEED: Final = 0
# Neither side diverges at this learning rate.
LR: Final = 1e-4
# An example, by the argument names of `transformers`.
HfRow: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingCase:
    """One model at one sequence length, and its data.

    Attributes:
        num_rows: number of rows per step of this package.
        shards: folder of the tokenised corpus.
        examples: examples of the same text for `transformers`, made by `make_examples`.
        tokenizer: folder with the data's `tokenizer.json`.
    """

    config: AlbertConfig
    length: int
    num_rows: int
    shards: Path
    examples: Sequence[HfRow]
    tokenizer: Path

    @property
    def padded_length(self) -> int:
        """The length of the rows of `transformers`."""
        return self.length

    def build_ours(self, device: torch.device, *, compiles: bool) -> Run:
        """Return the run of this package, with the settings of both sides."""
        config = PretrainConfig(
            output=Path("unused"),
            shards=self.shards,
            tokenizer=self.tokenizer,
            steps=sys.maxsize,
            device=device,
            compile=compiles,
            length=self.length,
            batch_size=self.num_rows,
            recipe="paper",
            optimizer="adamw",
            lr=LR,
            schedule="wsd",
            decay=0.1,
            dropout="v2",
        )
        recipe = config.changed(RECIPES[config.recipe])
        start = Start(folder=None, name=None, tokenizer=self.tokenizer)
        return open_job(config, recipe, self.config, start, World(device=device), "auto").build()

    def make_hf_model(self, attention: str) -> Any:
        """Return the `transformers` model with initial weights."""
        import transformers  # imported here, so that our own process does not load it

        config = transformers.AlbertConfig.from_dict(self.config.to_hf())
        config._attn_implementation = attention
        torch.manual_seed(_SEED)
        return transformers.AlbertForPreTraining(config)


def sized_config(shape: str, length: int, num_pieces: int) -> AlbertConfig:
    """Return a preset's sizes, with enough positions and pieces for the data."""
    sizes = PRESETS[shape]
    vocab_size = max(_SMALL_VOCAB if shape == "small" else sizes.vocab_size, num_pieces)
    return replace(sizes, vocab_size=vocab_size, max_positions=max(length, sizes.max_positions))


def make_examples(
    shards: Shards, tokenizer: Path, *, length: int, num_examples: int
) -> list[HfRow]:
    """Return the first examples of a tokenised corpus for `transformers`, one sequence each.

    The tokens, masks and labels are those of `albert-serve pretrain`. A small corpus is repeated.
    """
    masking = NgramMasking.of(AlbertTokenizer.from_file(tokenizer / "tokenizer.json"))
    plan = Plan(shards=shards, settings=ExampleSettings(length=length), seed=_SEED)
    rows = chain.from_iterable(plan.epoch(number) for number in count())
    hf_rows: list[HfRow] = []
    for example in islice(chain.from_iterable(rows), num_examples):
        tokens, second = example.tokens(shards.parts[example.part])
        masked, positions = masking(tokens, example.mask_rng(_SEED))
        labels = np.full(len(tokens), IGNORED)
        labels[positions] = tokens[positions]
        hf_rows.append(
            {
                "input_ids": masked.astype(np.int64),
                "token_type_ids": (np.arange(len(tokens)) >= second).astype(np.int64),
                "labels": labels,
                "sentence_order_label": int(example.label),
            }
        )
    return hf_rows
