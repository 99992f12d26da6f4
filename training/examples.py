"""Sentence-order examples from a tokenised corpus, reproducible by index.

Which examples an epoch has, their order and their masks follow from (seed, epoch, index) alone,
so a run can stop and go on anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from training.masking import NgramMasking
from training.model import Batch
from training.shards import Shards

IGNORED: Final = -100  # torch's ignore_index
# Tokens of the shortest pair worth training on: three special ones and a few of each segment.
MIN_LENGTH: Final = 8
_CLS, _SEP = 2, 3
_NUM_SPECIAL_IN_PAIR: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainBatch:
    """What one step of pretraining reads.

    Attributes:
        tokens: ids (B, S), masked.
        rows: (R,) positions to predict, as indices into the flattened (B * S).
        targets: (R,) the ids that stood there.
        orders: (B,) 0 in order, 1 swapped, IGNORED where an example has one segment.
    """

    tokens: Batch
    rows: Tensor
    targets: Tensor
    orders: Tensor

    def to(self, device: torch.device) -> PretrainBatch:
        """The same batch on another device."""
        return PretrainBatch(
            tokens=self.tokens.to(device),
            rows=self.rows.to(device),
            targets=self.targets.to(device),
            orders=self.orders.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class Examples:
    """All examples of one epoch.

    Attributes:
        bounds: (N, 4) begin and end of the first and the second segment in the corpus' tokens.
        orders: (N,) 0, 1 or IGNORED; the segments of a swapped pair stand swapped in `bounds`.
    """

    shards: Shards
    masking: NgramMasking
    bounds: NDArray[np.int64]
    orders: NDArray[np.int64]
    length: int
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.orders)

    def batch(self, indices: NDArray[np.int64]) -> PretrainBatch:
        """The examples of these indices, padded to `length` tokens."""
        shape = (len(indices), self.length)
        ids, types = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        lengths, rows, targets = np.zeros(len(indices), np.int64), [], []
        for line, index in enumerate(indices.tolist()):
            whole, second = self._tokens(index)
            rng = np.random.default_rng([self.seed, self.epoch, index])
            masked, chosen = self.masking(whole, rng)
            ids[line, : len(whole)] = masked
            types[line, second : len(whole)] = 1
            lengths[line] = len(whole)
            rows.append(line * self.length + chosen)
            targets.append(whole[chosen])
        return PretrainBatch(
            tokens=Batch(
                ids=torch.from_numpy(ids),
                types=torch.from_numpy(types),
                lengths=torch.from_numpy(lengths),
            ),
            rows=torch.from_numpy(np.concatenate(rows)),
            targets=torch.from_numpy(np.concatenate(targets)),
            orders=torch.from_numpy(self.orders[indices]),
        )

    def _tokens(self, index: int) -> tuple[NDArray[np.int64], int]:
        """[CLS] A [SEP] B [SEP], and where B begins (the end where there is none)."""
        first_begin, first_end, second_begin, second_end = self.bounds[index].tolist()
        tokens = self.shards.tokens
        parts: list[ArrayLike] = [[_CLS], tokens[first_begin:first_end], [_SEP]]
        if second_end > second_begin:
            parts += [tokens[second_begin:second_end], [_SEP]]
        return np.concatenate(parts).astype(np.int64), first_end - first_begin + 2


def build_examples(
    shards: Shards,
    masking: NgramMasking,
    *,
    length: int,
    seed: int,
    epoch: int,
    short_rate: float = 0.1,
) -> Examples:
    """The examples of one epoch: consecutive sentences, cut in two, half of them swapped.

    As the original's create_pretraining_data.py: sentences are gathered up to a target length,
    which is random in a part `short_rate` of the documents; the cut is at a random sentence;
    what is over `length` is taken from either end of the longer segment. Unlike the original, a
    chunk of one sentence has no order to predict; there it got a random second segment.
    """
    rng = np.random.default_rng([seed, epoch])
    room = length - _NUM_SPECIAL_IN_PAIR
    chunks = np.array(list(_chunks(shards, rng, room, short_rate)), np.int64).reshape(-1, 3)
    begin, cut, end = chunks.T
    bounds = np.stack([begin, cut, cut, end], axis=1)
    _truncate(bounds, rng, room)
    single = cut == end
    orders = np.where(single, IGNORED, rng.integers(0, 2, len(chunks)))
    swapped = orders == 1
    bounds[swapped] = bounds[swapped][:, [2, 3, 0, 1]]
    return Examples(
        shards=shards,
        masking=masking,
        bounds=bounds,
        orders=orders,
        length=length,
        seed=seed,
        epoch=epoch,
    )


def _chunks(
    shards: Shards, rng: np.random.Generator, room: int, short_rate: float
) -> Iterator[tuple[int, int, int]]:
    """Begin, cut and end of each chunk of sentences, in tokens; cut is end where it has one."""
    is_short = rng.random(shards.num_documents) < short_rate
    targets = np.where(is_short, rng.integers(2, room + 1, shards.num_documents), room).tolist()
    cuts = iter(rng.random(len(shards.sentences)).tolist())
    documents = shards.documents.tolist()
    for number, target in enumerate(targets):
        bounds = shards.sentences[documents[number] : documents[number + 1] + 1].tolist()
        first = 0
        for last in range(1, len(bounds)):
            if bounds[last] - bounds[first] >= target or last == len(bounds) - 1:
                num_sentences = last - first
                cut = first + 1 + int(next(cuts) * (num_sentences - 1))
                yield bounds[first], bounds[cut], bounds[last]
                first = last


def _truncate(bounds: NDArray[np.int64], rng: np.random.Generator, room: int) -> None:
    """Shorten the segments in place to `room` tokens together, the longer one first."""
    sizes = bounds[:, 1::2] - bounds[:, ::2]
    excess = np.maximum(sizes.sum(1) - room, 0)
    gap = sizes[:, 0] - sizes[:, 1]
    from_longer = np.minimum(excess, np.abs(gap))
    both = excess - from_longer
    cuts = np.stack([(both + 1) // 2, both // 2], axis=1)
    cuts[np.arange(len(cuts)), (gap < 0).astype(int)] += from_longer
    at_front = rng.binomial(cuts, 0.5)
    bounds[:, ::2] += at_front
    bounds[:, 1::2] -= cuts - at_front


def epoch_order(num_examples: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which an epoch visits its examples."""
    return np.random.default_rng([seed, epoch, 1]).permutation(num_examples)
