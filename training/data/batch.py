"""Micro-batches: the tokens and targets of one forward pass.

Shape legend: B rows, S positions, R tokens to predict, C sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from training.model.albert import ModelInputs, move

# Name of the head that the loss trains. Only the loss of pairs in both orders has a name of its own
# (training/tasks/pretraining/files.py).
LossName: TypeAlias = str


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """A batch that goes through the model in one forward pass.

    Attributes:
        task: name of the task, which selects the loss function.
        tokens: token ids (B, S), padded or packed.
        num_tokens: number of tokens without padding.
        counts: number of predictions for each loss.
    """

    task: str
    tokens: ModelInputs
    num_tokens: int
    counts: Mapping[LossName, int]

    def to(self, device: torch.device) -> Self:
        """Return the batch on another device."""
        return move(self, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainBatch(MicroBatch):
    """A micro-batch for pretraining.

    Attributes:
        rows: (R,) positions of the tokens to predict, as indices into the flattened (B * S).
        targets: (R,) original ids, or IGNORED in the entries that round R up.
        firsts: (C,) position of each sequence's [CLS], as an index into the flattened (B * S).
        labels: (C,) labels of the sentence task, or IGNORED.
        counts: number of predictions for each loss ("sentence-order" only with a sentence task).
    """

    task: str = "pretraining"
    rows: Tensor
    targets: Tensor
    firsts: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenisedExample:
    """The tokens of one sequence, and the target of its loss.

    Attributes:
        target: label of a text, or 1 or 0 for each of several labels. In question answering:
            positions of the answer's first and last token, both 0 (the [CLS]) if there is no
            answer. In token classification: index of each token's tag, or IGNORED.
    """

    ids: list[int]
    types: list[int]
    target: Any

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in the sequence, as a list with one item."""
        return [len(self.ids)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleBatch(MicroBatch):
    """A micro-batch of examples, with a prediction for each example or for each of its words.

    Attributes:
        firsts: (C,) position of each example's [CLS], as an index into the flattened (B * S).
        sizes: (C,) number of tokens in each example.
        targets: (C, ...) targets, or (C, T) in token classification, where T is the number of
            tokens in the longest example.
    """

    firsts: Tensor
    sizes: Tensor
    targets: Tensor


def pad(sequences: Sequence[tuple[list[int], list[int]]]) -> ModelInputs:
    """Collate sequences (ids and types) into a batch (B, S), padded on the right."""
    lengths = torch.tensor([len(ids) for ids, _ in sequences])
    shape = (len(sequences), int(lengths.max()))
    ids, types = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, (row_ids, row_types) in enumerate(sequences):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        types[row, : len(row_types)] = torch.tensor(row_types)
    return ModelInputs(ids=ids, types=types, lengths=lengths)
