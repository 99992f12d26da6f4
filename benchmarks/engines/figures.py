"""The arithmetic of the tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from albert_serve.config import AlbertConfig
from benchmarks.engines.jobs import Peak, Shape, Turn


def forward_flops(config: AlbertConfig, shape: Shape, num_labels: int) -> float:
    """Floating-point operations of the matrix products of encoder and classifier.

    2 for each multiplication with its addition, of which there are

        E*H + L * (4H² + 2HF)    a token: `num_compute_weights` without its output layer over the
                                 vocabulary and its pooler, which a token of this model has not
        L * 2S²H                 a sequence: the attention's scores and sums
        H² + HK                  a sequence: pooler and K labels

    Lookups, norms, activations and softmax are not counted.
    """
    hidden = config.hidden_size
    per_token = (
        config.num_compute_weights - config.vocab_size * config.embedding_size - hidden * hidden
    )
    attention = len(config.layer_plan) * 2 * shape.length**2 * hidden
    per_row = shape.length * per_token + attention + hidden * hidden + hidden * num_labels
    return 2.0 * shape.num_rows * per_row


def median_seconds(turns: Sequence[Turn]) -> float:
    """Of one call or pass, over rounds."""
    return statistics.median(turn.seconds for turn in turns)


def median_rate(turns: Sequence[Turn]) -> float:
    """Items a second, over rounds."""
    return statistics.median(turn.items_per_s for turn in turns)


def speed_ratio(
    turns: Sequence[Turn],
    others: Sequence[Turn],
    rate: Callable[[Turn], float] = lambda turn: turn.items_per_s,
) -> float:
    """How many times as fast the first are: the median of the ratios of each round.

    What else the machine does changes less within a round than between rounds.
    """
    pairs = zip(turns, others, strict=True)
    return statistics.median(rate(one) / rate(other) for one, other in pairs)


def part_of_peak(turns: Sequence[Turn], peaks: Sequence[Peak], flops: float) -> float:
    """Speed of a call as a part of the fp32 products' in the same round, the median over rounds."""
    pairs = zip(turns, peaks, strict=True)
    return statistics.median(flops / turn.seconds / peak.fp32 for turn, peak in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far probabilities are from the reference's.

    Attributes:
        largest: absolute, of all labels and items.
        relative: root mean square, as a part of how much the reference's vary over the items; an
            answer that does not depend on the text would have 1.
        same_label: part of the items whose most probable label is the reference's.
        num_items: how many were compared.
    """

    largest: float
    relative: float
    same_label: float
    num_items: int


def difference(
    outputs: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
) -> Difference:
    """Compare probabilities (N, K) of the same items."""
    given_NK, right_NK = np.array(outputs), np.array(reference)
    apart_NK = given_NK - right_NK
    spread = spread_of(reference)
    rms = float(np.sqrt((apart_NK**2).mean()))
    return Difference(
        largest=float(np.abs(apart_NK).max()),
        relative=rms / spread if spread else float("inf") if rms else 0.0,
        same_label=float((given_NK.argmax(1) == right_NK.argmax(1)).mean()),
        num_items=len(given_NK),
    )


def spread_of(outputs: Sequence[Sequence[float]]) -> float:
    """Standard deviation of the probabilities (N, K) over the items."""
    return float(np.array(outputs).std(axis=0).mean())


def same_answers(outputs: Sequence[str], reference: Sequence[str]) -> float:
    """Part of the answers that are the reference's, white space around them aside."""
    pairs = zip(outputs, reference, strict=True)
    return statistics.fmean(one.strip() == other.strip() for one, other in pairs)
