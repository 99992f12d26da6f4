"""Sentence order on held-out text: pairs of segments in both orders, without masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from albert_serve.progress import progress
from training.data.examples import ExampleSettings
from training.data.order import OrderBatch, OrderCollator
from training.data.packing import Plan
from training.data.shards import Shards
from training.evaluation.validation import measure
from training.losses import Objective
from training.model.heads import AlbertForTasks
from training.order_losses import paired_order_loss
from training.system.precision import PrecisionName

# Fixed, so that all models are asked for the same pairs.
_SEED: Final = 12345
_TOKENS_A_BATCH: Final = 4096


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
    single = _figures(
        model, shards, replace(settings, min_sentences=1, single_sentences=True), products
    )
    figures = _figures(model, shards, settings, products)
    return figures | {f"single_{name}": figure for name, figure in single.items()}


def _figures(
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
