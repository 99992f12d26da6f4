"""Continued pretraining in a finetuning run: masked tokens and sentence order."""

from __future__ import annotations

import argparse
from typing import Final

from albert_serve.tokenizer import AlbertTokenizer
from training.data.collate import Collator, Slicing
from training.data.corpus import CorpusError, find_errors, find_files
from training.data.examples import ExampleSettings
from training.data.feeds import PlannedFeed
from training.data.labelled.errors import raise_listed
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan
from training.data.shards import SHARDS_FILE
from training.loop.distributed import World, main_first
from training.loop.progress import RunError
from training.model.checkpoint import read_config
from training.prepare import prepare
from training.run.job import largest_divisor

# Text up to this size is read for its errors although other data has some.
_CHECKED_BYTES: Final = 64 << 20


def pretraining_feed(
    options: argparse.Namespace, tokenizer: AlbertTokenizer, num_rows: int, world: World
) -> PlannedFeed:
    """Return the task stream of `--pretraining`, whose text is prepared if need be.

    Args:
        num_rows: packed rows of a step, over all processes.

    Raises:
        CorpusError, ShardError: the text cannot be read or prepared; all bad lines are listed.
        RunError: the rows cannot be divided among the processes.
    """
    if num_rows % world.size:
        raise RunError(
            f"--batch-size {num_rows} of pretraining is no multiple of the {world.size} processes"
        )
    rows_a_batch = largest_divisor(num_rows // world.size, options.micro_batch_size or num_rows)
    tokenizer_file = options.initialize_from / "tokenizer.json"
    with main_first(world):
        try:
            shards = prepare(options.pretraining, tokenizer_file, options.output / "shards")
        except CorpusError:
            raise_listed(list(find_errors(find_files(options.pretraining))))
            raise
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    return PlannedFeed(
        plan=Plan(shards=shards, settings=_example_settings(options), seed=options.seed),
        collate=Collator(shards=shards, masking=masking, length=options.length, seed=options.seed),
        slicing=Slicing(
            num_rows=num_rows, rows_a_batch=rows_a_batch, rank=world.rank, world_size=world.size
        ),
    )


def check_pretraining(options: argparse.Namespace, world: World) -> None:
    """Check the text of `--pretraining` of a run that cannot start because of other data.

    The main process reads up to 64 MiB of it, unless it is prepared already; a large corpus would
    delay the other errors by hours.

    Raises:
        CorpusError: it cannot be read; all of it is listed.
    """
    files = find_files(options.pretraining)
    is_prepared = (options.output / "shards" / SHARDS_FILE).is_file()
    is_small = sum(file.stat().st_size for file in files) <= _CHECKED_BYTES
    if world.is_main and is_small and not is_prepared:
        raise_listed(list(find_errors(files)))


def _example_settings(options: argparse.Namespace) -> ExampleSettings:
    """Return the settings with the sentence task of the checkpoint's pretraining."""
    task = read_config(options.initialize_from).get("albert_sentence_task")
    return ExampleSettings(length=options.length, sentence_task="nsp" if task == "nsp" else "sop")
