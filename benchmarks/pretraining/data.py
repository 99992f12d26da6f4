"""The same text for both sides: shards for ours, and their examples as arrays for `transformers`.

Shape legend: N examples, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from albert_serve.tokenizer import AlbertTokenizer
from training.data.examples import IGNORED, Example, ExampleSettings
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan
from training.data.shards import Shards

_ARRAYS = ("ids", "types", "labels", "lengths", "orders")
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrays:
    """Examples, one a row, padded on the right.

    Attributes:
        ids: (N, S), masked.
        types: (N, S), 0 for the first segment, 1 for the second.
        labels: (N, S), the id that stood at a masked token, or IGNORED.
        lengths: (N,) real tokens.
        orders: (N,) labels of sentence order, or IGNORED.
    """

    ids: NDArray[np.int32]
    types: NDArray[np.int32]
    labels: NDArray[np.int32]
    lengths: NDArray[np.int32]
    orders: NDArray[np.int32]

    @classmethod
    def open(cls, folder: Path) -> Arrays:
        """Read the examples that `write` wrote."""
        return cls(**{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS})

    @property
    def fill(self) -> float:
        """Part of a row padded to the full length that is real tokens."""
        return float(self.lengths.mean() / self.ids.shape[1])

    @property
    def mean_seen(self) -> float:
        """Tokens of the sequence of a token, on average over tokens."""
        sizes = self.lengths.astype(np.float64)
        return float((sizes**2).sum() / sizes.sum())

    @property
    def masked_rate(self) -> float:
        """Part of the real tokens that is predicted."""
        return float((self.labels != IGNORED).sum() / self.lengths.sum())


def write(
    shards: Shards, tokenizer: Path, folder: Path, *, length: int, num_examples: int
) -> Arrays:
    """Write the first examples of a run over a tokenised corpus as arrays.

    Examples, masks and labels are those that `training.pretrain` makes of them, each one a
    sequence of its own. A corpus too small gives as many epochs as it takes.
    """
    masking = NgramMasking(
        word_starts=word_starts(AlbertTokenizer.from_file(tokenizer / "tokenizer.json"))
    )
    arrays = _empty(num_examples, length)
    for row, example in enumerate(_examples(shards, length, num_examples)):
        _fill(arrays, row, example, shards, masking)
    folder.mkdir(parents=True, exist_ok=True)
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(arrays, name))
    return Arrays.open(folder)


def _examples(shards: Shards, length: int, num_examples: int) -> Iterator[Example]:
    plan = Plan(shards=shards, settings=ExampleSettings(length=length), seed=_SEED)
    rows = chain.from_iterable(plan.epoch(number) for number in count())
    return islice(chain.from_iterable(rows), num_examples)


def _empty(num_examples: int, length: int) -> Arrays:
    shape = (num_examples, length)
    return Arrays(
        ids=np.zeros(shape, np.int32),
        types=np.zeros(shape, np.int32),
        labels=np.full(shape, IGNORED, np.int32),
        lengths=np.zeros(num_examples, np.int32),
        orders=np.zeros(num_examples, np.int32),
    )


def _fill(
    arrays: Arrays, row: int, example: Example, shards: Shards, masking: NgramMasking
) -> None:
    whole, second = example.tokens(shards.parts[example.part])
    masked, chosen = masking(whole, example.mask_rng(_SEED))
    arrays.ids[row, : len(whole)] = masked
    arrays.types[row, second : len(whole)] = 1
    arrays.labels[row, chosen] = whole[chosen]
    arrays.lengths[row], arrays.orders[row] = len(whole), example.label
