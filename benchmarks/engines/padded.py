"""Texts as padded batches of like lengths, and the classifiers that take them.

Shape legend: B sequences, S positions, K labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Encode: TypeAlias = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sequences padded on the right; all (B, S).

    Attributes:
        mask: 1 at real tokens.
    """

    ids: Ints
    types: Ints
    mask: Ints

    def feed(self) -> dict[str, Ints]:
        """By the names that `transformers` has."""
        return {
            "input_ids": self.ids,
            "attention_mask": self.mask,
            "token_type_ids": self.types,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Tokens of a pass: real ones, and those computed, padding included."""

    num_real: int
    num_computed: int

    @classmethod
    def of(cls, lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> Tokens:
        """Those of sequences in groups, each padded to its longest."""
        computed = sum(len(members) * max(lengths[i] for i in members) for members in groups)
        return cls(num_real=sum(lengths), num_computed=computed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a pass over a stream gave.

    Attributes:
        outputs: of each item, in order: probabilities, or the text of an answer.
        count: counts its tokens; called when the time has been taken.
    """

    outputs: list[Any]
    count: Callable[[], Tokens]


class RunBatches(Protocol):
    """Logits (B, K) of each batch."""

    def __call__(self, batches: Sequence[Batch]) -> list[Floats]:
        """Run them, in whatever way is fastest."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedClassifier:
    """Classifies texts in batches of like lengths, each padded to its longest."""

    encode: Encode
    run: RunBatches

    def logits(self, batch: Batch) -> Floats:
        """Logits (B, K) of a batch."""
        return self.run([batch])[0]

    def process(self, items: Sequence[str], batch_size: int) -> Outcome:
        """Probabilities of each text, tokenisation included."""
        sequences = self.encode(list(items))
        lengths = [len(ids) for ids in sequences]
        groups = group(lengths, batch_size)
        logits = self.run([pad([sequences[i] for i in members]) for members in groups])
        outputs: list[Any] = [None] * len(items)
        for members, logits_BK in zip(groups, logits, strict=True):
            for index, row in zip(members, probabilities(logits_BK), strict=True):
                outputs[index] = row
        return Outcome(outputs=outputs, count=lambda: Tokens.of(lengths, groups))


def group(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in batches of like lengths, longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def in_order(num_items: int, batch_size: int) -> list[list[int]]:
    """Indices in batches, in their own order."""
    order = list(range(num_items))
    return [order[start : start + batch_size] for start in range(0, num_items, batch_size)]


def pad(sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] = ()) -> Batch:
    """A batch of these ids; without `types` all are of the first segment."""
    shape = (len(sequences), max(len(ids) for ids in sequences))
    ids_BS, types_BS, mask_BS = (np.zeros(shape, np.int64) for _ in range(3))
    for row, ids in enumerate(sequences):
        ids_BS[row, : len(ids)] = ids
        mask_BS[row, : len(ids)] = 1
        if types:
            types_BS[row, : len(ids)] = types[row]
    return Batch(ids=ids_BS, types=types_BS, mask=mask_BS)


def probabilities(logits_BK: Floats) -> list[list[float]]:
    """Softmax over the labels; the logistic function of a single one."""
    wide = logits_BK.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    found: list[list[float]] = (shares if wide.shape[1] > 1 else 1 / (1 + np.exp(-wide))).tolist()
    return found


def plain_encoder(tokenizer_file: Path, max_tokens: int) -> Encode:
    """Ids of texts, cut to `max_tokens`, by the `tokenizers` library alone."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(max_length=max_tokens)
    tokenizer.no_padding()
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
