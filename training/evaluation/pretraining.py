"""Evaluation of pretraining on held-out text: masked tokens, and the sentence task."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from albert_serve.progress import progress
from albert_serve.tokenizer import AlbertTokenizer
from training.data.examples import ExampleSettings, SentenceTask
from training.data.masking import NgramMasking
from training.data.preparation import prepare
from training.data.shards import Shards
from training.evaluation.sentence_order import order_figures
from training.evaluation.validation import held_out, measure, unigram_entropy
from training.losses import Objective
from training.model.checkpoint import read_config
from training.model.heads import AlbertForTasks, Task
from training.system.precision import PrecisionName


def evaluate_text(
    model: AlbertForTasks,
    folder: Path,
    files: Sequence[Path],
    *,
    length: int,
    products: PrecisionName = "auto",
) -> dict[str, float]:
    """Evaluate a checkpoint's model on text, by its own tokenizer and sentence task.

    Args:
        folder: of the checkpoint.
        length: maximum tokens of a sequence.
    """
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
    tallies = measure(Objective(model, device), shown, tasks, device, products)
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
