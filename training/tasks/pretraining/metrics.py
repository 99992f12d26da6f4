"""Evaluation of pretraining on held-out text: masked tokens, and the sentence task."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from albert_serve.progress import progress
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import PretrainBatch
from training.data.collate import Collator
from training.data.examples import ExampleSettings, SentenceTask
from training.data.masking import NgramMasking
from training.data.packing import Plan
from training.data.preparation import prepare
from training.data.shards import Shards
from training.loop.validation import measure
from training.losses import Objective
from training.model.checkpoint import read_config
from training.model.heads import AlbertForTasks, Task
from training.system.precision import PrecisionName
from training.tasks.pretraining.files import OrderBatch, OrderCollator
from training.tasks.pretraining.loss import paired_order_loss, pretrain_loss

# Fixed, so that all models predict the same tokens.
_SEED: Final = 12345
_TOKENS_A_BATCH: Final = 4096


def evaluate_text(
    model: AlbertForTasks,
    folder: Path,
    files: Sequence[Path],
    *,
    length: int,
    products: PrecisionName = "auto",
) -> dict[str, float]:
    """Evaluate a checkpoint's model on text, by its own tokenizer and sentence task."""
    tokenizer_file = folder / "tokenizer.json"
    masking = NgramMasking.of(AlbertTokenizer.from_file(tokenizer_file))
    settings = ExampleSettings(length=length, sentence_task=_sentence_task(folder, model))
    with tempfile.TemporaryDirectory() as scratch:
        shards = prepare(files, tokenizer_file, Path(scratch) / "shards")
        return evaluate_pretraining(model, shards, masking, settings, products)


def _sentence_task(folder: Path, model: AlbertForTasks) -> SentenceTask:
    """Return the task that the checkpoint's sentence head was trained on."""
    if "sentence-order" not in model.tasks:
        return "none"
    return "nsp" if read_config(folder).get("albert_sentence_task") == "nsp" else "sop"


def evaluate_pretraining(
    model: AlbertForTasks,
    shards: Shards,
    masking: NgramMasking,
    settings: ExampleSettings,
    products: PrecisionName = "auto",
) -> dict[str, float]:
    """Evaluate masked tokens (loss in nats, accuracy) and the sentence task; nan without any.

    Next sentences are among masked tokens, as they are learnt. The order of segments is asked for
    without masks, in both orders, and masked tokens then stand in texts of one segment, as the
    service fills them: a model that learnt order in steps of its own saw no masks in pairs.

    `unigram_entropy` is the loss of a model that has learnt the token frequencies of this text
    and nothing else.
    """
    device = next(model.parameters()).device
    tasks: tuple[Task, ...] = ("fill-mask",)
    masked_settings = replace(settings, sentence_task="none")
    if settings.sentence_task == "nsp":
        tasks, masked_settings = ("fill-mask", "sentence-order"), settings
    batches = list(held_out(shards, masking, masked_settings))
    shown = progress(batches, title="validation", unit="batches")
    tallies = measure(
        Objective(model, device, {"pretraining": pretrain_loss}), shown, tasks, device, products
    )
    assert tallies is not None
    masked = tallies["fill-mask"]
    figures = {
        "masked_loss": masked.loss,
        "masked_accuracy": masked.accuracy,
        "masked_tokens": masked.count,
        "unigram_entropy": unigram_entropy(shards, model.config.vocab_size),
    }
    if settings.sentence_task == "nsp":
        order = tallies["sentence-order"]
        figures |= {
            "next_sentence_loss": order.loss,
            "next_sentence_accuracy": order.accuracy,
            "next_sentence_pairs": order.count,
        }
    if settings.sentence_task == "sop":
        figures |= order_figures(model, shards, settings, products)
    return figures


def held_out(
    shards: Shards, masking: NgramMasking, settings: ExampleSettings, *, max_rows: int | None = None
) -> Iterator[PretrainBatch]:
    """Yield batches of the packed rows of one epoch, or its first `max_rows`; deterministic."""
    plan = Plan(shards=shards, settings=settings, seed=_SEED)
    collate = Collator(shards=shards, masking=masking, length=settings.length, seed=_SEED)
    rows = islice(plan.epoch(0), max_rows)
    size = max(1, _TOKENS_A_BATCH // settings.length)
    while chunk := list(islice(rows, size)):
        yield collate(chunk)


def unigram_entropy(shards: Shards, vocab_size: int) -> float:
    """Return the entropy of the corpus' token frequencies, in nats.

    It is the loss of a model that has learnt the token frequencies of this text and nothing else.
    """
    counts = shards.token_counts(vocab_size)
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def order_figures(
    model: AlbertForTasks,
    shards: Shards,
    settings: ExampleSettings,
    products: PrecisionName = "auto",
) -> dict[str, float]:
    """Return how well a model knows the order of pairs; nan without any.

    `sentence_order_loss` and `_accuracy` are of each order alone, `_paired_accuracy` of both
    compared: chance is a half. `single_sentence_order_...` are the same of two single sentences of
    like lengths.

    Args:
        settings: of which the length and the fraction of shorter examples count.
    """
    settings = replace(settings, sentence_task="pairs")
    single = _order_figures(
        model, shards, replace(settings, min_sentences=1, single_sentences=True), products
    )
    figures = _order_figures(model, shards, settings, products)
    return figures | {f"single_{name}": figure for name, figure in single.items()}


def _order_figures(
    model: AlbertForTasks, shards: Shards, settings: ExampleSettings, products: PrecisionName
) -> dict[str, float]:
    device = next(model.parameters()).device
    batches = list(_held_out_pairs(shards, settings))
    objective = Objective(model, device, {"sentence-order": paired_order_loss})
    shown = progress(batches, title="sentence order", unit="batches")
    tallies = measure(objective, shown, ("sentence-order", "paired-order"), device, products)
    assert tallies is not None
    alone, paired = tallies["sentence-order"], tallies["paired-order"]
    return {
        "sentence_order_loss": alone.loss,
        "sentence_order_accuracy": alone.accuracy,
        "sentence_order_paired_accuracy": paired.accuracy,
        "sentence_order_pairs": paired.count,
    }


def _held_out_pairs(shards: Shards, settings: ExampleSettings) -> Iterator[OrderBatch]:
    collate = OrderCollator(shards=shards, length=settings.length)
    rows = Plan(shards=shards, settings=settings, seed=_SEED).epoch(0)
    size = max(1, _TOKENS_A_BATCH // (2 * settings.length))
    while chunk := list(islice(rows, size)):
        yield collate(chunk)
