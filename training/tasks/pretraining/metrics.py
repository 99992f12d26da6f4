"""Evaluation of pretraining on held-out text: masked tokens and the sentence task."""

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

# A constant seed, so that all models predict the same tokens.
_SEED: Final = 12345
_MAX_BATCH_TOKENS: Final = 4096


def evaluate_text(
    model: AlbertForTasks,
    folder: Path,
    files: Sequence[Path],
    *,
    length: int,
    products: PrecisionName = "auto",
) -> dict[str, float]:
    """Evaluate a checkpoint's model on text, with the checkpoint's tokenizer and sentence task."""
    tokenizer_file = folder / "tokenizer.json"
    masking = NgramMasking.of(AlbertTokenizer.from_file(tokenizer_file))
    settings = ExampleSettings(length=length, sentence_task=_sentence_task(folder, model))
    with tempfile.TemporaryDirectory() as scratch:
        shards = prepare(files, tokenizer_file, Path(scratch) / "shards")
        return evaluate_pretraining(model, shards, masking, settings, products)


def _sentence_task(folder: Path, model: AlbertForTasks) -> SentenceTask:
    """Return the sentence task of the checkpoint's pretraining."""
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
    """Measure masked tokens (loss in nats, accuracy) and the sentence task, or nan without any.

    Next-sentence prediction is measured on masked pairs, as in training. Sentence order is measured
    on pairs without masks, in both orders, because the separate steps that train it have no masks.
    Masked tokens are then measured in single segments, as in the service's requests.

    `unigram_entropy` is the loss of a model that has learnt only the text's token frequencies.
    """
    device = next(model.parameters()).device
    tasks: tuple[Task, ...] = ("fill-mask",)
    masked_settings = replace(settings, sentence_task="none")
    if settings.sentence_task == "nsp":
        tasks, masked_settings = ("fill-mask", "sentence-order"), settings
    batches = list(held_out(shards, masking, masked_settings))
    batches_shown = progress(batches, title="validation", unit="batches")
    objective = Objective(model, device, {"pretraining": pretrain_loss})
    tallies = measure(objective, batches_shown, tasks, device, products)
    assert tallies is not None
    masked = tallies["fill-mask"]
    metrics = {
        "masked_loss": masked.loss,
        "masked_accuracy": masked.accuracy,
        "masked_tokens": masked.count,
        "unigram_entropy": unigram_entropy(shards, model.config.vocab_size),
    }
    if settings.sentence_task == "nsp":
        order = tallies["sentence-order"]
        metrics |= {
            "next_sentence_loss": order.loss,
            "next_sentence_accuracy": order.accuracy,
            "next_sentence_pairs": order.count,
        }
    if settings.sentence_task == "sop":
        metrics |= order_metrics(model, shards, settings, products)
    return metrics


def held_out(
    shards: Shards, masking: NgramMasking, settings: ExampleSettings, *, max_rows: int | None = None
) -> Iterator[PretrainBatch]:
    """Yield the batches of one epoch, or of its first `max_rows` rows, with a constant seed."""
    plan = Plan(shards=shards, settings=settings, seed=_SEED)
    collate = Collator(shards=shards, masking=masking, length=settings.length, seed=_SEED)
    rows = islice(plan.epoch(0), max_rows)
    size = max(1, _MAX_BATCH_TOKENS // settings.length)
    while chunk := list(islice(rows, size)):
        yield collate(chunk)


def unigram_entropy(shards: Shards, vocab_size: int) -> float:
    """Return the entropy of the corpus' token frequencies, in nats."""
    counts = shards.token_counts(vocab_size)
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def order_metrics(
    model: AlbertForTasks,
    shards: Shards,
    settings: ExampleSettings,
    products: PrecisionName = "auto",
) -> dict[str, float]:
    """Return the metrics of sentence order, or nan if the text has no pairs.

    `sentence_order_loss` and `_accuracy` measure each order alone. `_paired_accuracy` measures the
    comparison of both orders. An accuracy of a half is chance. Names with `single_` are metrics of
    pairs of single sentences of similar lengths.

    Args:
        settings: settings of examples, of which only `length` and `short_rate` are used.
    """
    settings = replace(settings, sentence_task="pairs")
    single = _measure_order(
        model, shards, replace(settings, min_sentences=1, single_sentences=True), products
    )
    metrics = _measure_order(model, shards, settings, products)
    return metrics | {f"single_{name}": value for name, value in single.items()}


def _measure_order(
    model: AlbertForTasks, shards: Shards, settings: ExampleSettings, products: PrecisionName
) -> dict[str, float]:
    device = next(model.parameters()).device
    batches = list(_held_out_pairs(shards, settings))
    objective = Objective(model, device, {"sentence-order": paired_order_loss})
    batches_shown = progress(batches, title="sentence order", unit="batches")
    tallies = measure(
        objective, batches_shown, ("sentence-order", "paired-order"), device, products
    )
    assert tallies is not None
    single, paired = tallies["sentence-order"], tallies["paired-order"]
    return {
        "sentence_order_loss": single.loss,
        "sentence_order_accuracy": single.accuracy,
        "sentence_order_paired_accuracy": paired.accuracy,
        "sentence_order_pairs": paired.count,
    }


def _held_out_pairs(shards: Shards, settings: ExampleSettings) -> Iterator[OrderBatch]:
    collate = OrderCollator(shards=shards, length=settings.length)
    rows = Plan(shards=shards, settings=settings, seed=_SEED).epoch(0)
    size = max(1, _MAX_BATCH_TOKENS // (2 * settings.length))
    while chunk := list(islice(rows, size)):
        yield collate(chunk)
