"""Sentence order on held-out text: pairs of segments in both orders, without masks.

Beside the model stands a probe that sees lengths and words alone: what it gets right, content says
whatever the order, and only what a model gets right beyond it is knowledge of order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.progress import progress
from training.data.examples import ExampleSettings, build_examples
from training.data.order import OrderBatch, OrderCollator
from training.data.packing import Plan
from training.data.shards import Shard, Shards
from training.evaluation.validation import measure
from training.losses import Objective
from training.model.heads import AlbertForTasks
from training.order_losses import paired_order_loss
from training.system.precision import PrecisionName

# Fixed, so that all models are asked for the same pairs.
_SEED: Final = 12345
_TOKENS_A_BATCH: Final = 4096
_NUM_FOLDS: Final = 5
# Inverse, of the probe; of 0.003 to 0.3 about the best on Wikipedia, at 128 tokens and at 512.
_REGULARIZATION: Final = 0.01


def order_figures(
    model: AlbertForTasks,
    shards: Shards,
    settings: ExampleSettings,
    products: PrecisionName = "auto",
) -> dict[str, float]:
    """Return how well a model knows the order of pairs, and how well the probe does; nan for none.

    `sentence_order_loss` and `_accuracy` are of each order alone, `_paired_accuracy` of both
    compared, and so is `_probe_accuracy`: chance is a half. `single_sentence_order_...` are the
    same of two single sentences of like lengths.

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
        "sentence_order_probe_accuracy": probe_accuracy(shards, settings),
        "sentence_order_pairs": paired.count,
    }


def _held_out_pairs(shards: Shards, settings: ExampleSettings) -> Iterator[OrderBatch]:
    collate = OrderCollator(shards=shards, length=settings.length)
    rows = Plan(shards=shards, settings=settings, seed=_SEED).epoch(0)
    size = max(1, _TOKENS_A_BATCH // (2 * settings.length))
    while chunk := list(islice(rows, size)):
        yield collate(chunk)


def probe_accuracy(shards: Shards, settings: ExampleSettings) -> float:
    """Return how often a linear model on lengths and words finds the right order of a pair.

    Its features are the differences of both segments' logarithmic counts of each token and of
    their lengths, so that it scores a pair and its swap alike; it is fitted on four fifths of the
    documents and asked about the others, five times. nan with fewer than five documents of pairs.
    """
    # They take a second, and few evaluations get here.
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold

    vocab_size = 1 + max(int(part.tokens.max()) for part in shards.parts)
    parts = [
        _features(part, settings, number, vocab_size) for number, part in enumerate(shards.parts)
    ]
    differences = sparse.vstack([features for features, _ in parts], format="csr")
    offsets = np.cumsum([0, *(part.num_documents for part in shards.parts)])
    documents = np.concatenate(
        [numbers + offset for (_, numbers), offset in zip(parts, offsets, strict=False)]
    )
    if len(np.unique(documents)) < _NUM_FOLDS:
        return math.nan
    folds = GroupKFold(_NUM_FOLDS, shuffle=True, random_state=0)
    num_right = 0
    for fitted, asked in folds.split(documents, groups=documents):
        signs = np.resize([1, -1], len(fitted))
        probe = LogisticRegression(C=_REGULARIZATION, fit_intercept=False, max_iter=1000)
        probe.fit(differences[fitted].multiply(signs[:, None]).tocsr(), signs)
        num_right += int((probe.decision_function(differences[asked]) > 0).sum())
    return num_right / len(documents)


def _features(
    part: Shard, settings: ExampleSettings, number: int, vocab_size: int
) -> tuple[Any, NDArray[np.int64]]:
    """Return the features (N, V + 3) of each pair of a part, and the number of its document."""
    bounds = build_examples(part, settings, seed=_SEED, epoch=0, number=number).bounds
    begins = part.sentences[part.documents]
    documents = np.searchsorted(begins, bounds[:, 0], "right") - 1
    first, second = (
        _segments(part, bounds[:, side], bounds[:, side + 1], vocab_size) for side in (0, 2)
    )
    return first - second, documents


def _segments(
    part: Shard, begins: NDArray[np.int64], ends: NDArray[np.int64], vocab_size: int
) -> Any:
    """Return the features of segments: logarithms of token counts, lengths and sentences."""
    from scipy import sparse

    sizes = ends - begins
    rows = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    tokens = part.tokens[np.repeat(begins, sizes) + within].astype(np.int64)
    shape = (len(sizes), vocab_size)
    counts = sparse.csr_matrix((np.ones(len(rows)), (rows, tokens)), shape=shape)
    num_sentences = np.searchsorted(part.sentences, ends) - np.searchsorted(part.sentences, begins)
    lengths = np.stack([sizes / 100, np.log1p(sizes), num_sentences], axis=1)
    return sparse.hstack([counts.log1p(), sparse.csr_matrix(lengths)], format="csr")
