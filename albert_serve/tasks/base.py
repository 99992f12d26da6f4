"""The interface between tasks and the engine: encoder inputs, their batches, and logits.

Shape legend: R rows that a head reads, K outputs of the task's head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from albert_serve.bundle.manifest import HeadEntry
from albert_serve.bundle.sentence_vectors import SentenceVectors
from albert_serve.bundle.weights import task_of
from albert_serve.errors import EngineError
from albert_serve.tokenizer import AlbertTokenizer

Logits: TypeAlias = NDArray[np.float32]
Reduction: TypeAlias = Literal["none", "mean", "max"]
# Approximate memory of an entry of an answer: its object and its JSON, without its text.
ENTRY_BYTES: Final = 500

_AnswerT_co = TypeVar("_AnswerT_co", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderInput:
    """One unpadded sequence for the encoder, and the positions that the head reads.

    Attributes:
        ids: token ids, including special tokens.
        types: token type of each id: 0 in the first segment and 1 in the second.
        task: head that reads the rows: a task's name, or `text-classification/NAME`. Feature
            extraction has no head, so its logits are the hidden states.
        rows: positions that the head reads, in the order of the logits, or None for all.
        reduction: "mean" or "max" to replace all rows of logits by their mean or maximum. The
            engine does this, so that the rows need not stay in memory.
    """

    ids: list[int]
    types: list[int]
    task: str
    rows: list[int] | None
    reduction: Reduction = "none"

    @property
    def endpoint(self) -> str:
        """The task of the head that reads the rows."""
        return task_of(self.task)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared(Generic[_AnswerT_co]):
    """An item ready for the engine.

    Attributes:
        inputs: encoder inputs, at least one.
        finish: function that returns the answer, given the logits (R, K) of each input, in order.
        num_truncated: number of truncated tokens, if the caller allowed truncation.
        answer_bytes: approximate memory of the answer, or 0 if no parameter can make it large.
        warnings: warnings for the caller.
    """

    inputs: list[EncoderInput]
    finish: Callable[[list[Logits]], _AnswerT_co]
    num_truncated: int = 0
    answer_bytes: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all inputs."""
        return sum(len(item.ids) for item in self.inputs)


def inputs_of(prepared: Sequence[Prepared[Any]]) -> list[EncoderInput]:
    """Return the encoder inputs of all items, in order."""
    return [encoder_input for item in prepared for encoder_input in item.inputs]


def finish_all(prepared: Sequence[Prepared[Any]], logits: Sequence[Logits]) -> list[Any]:
    """Return the answer of each item, from the logits of `inputs_of(prepared)`, in order."""
    remaining = iter(logits)
    return [item.finish([next(remaining) for _ in item.inputs]) for item in prepared]


class Runner(Protocol):
    """The interface of an engine, which forms batches of the inputs itself."""

    @property
    def max_batch_tokens(self) -> int:
        """The maximum number of tokens in a batch, including padding."""
        ...

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Return the logits (R, K) of each input's rows, in order."""
        ...


class Task(Protocol):
    """The logic of one endpoint, independent of the runtime."""

    def prepare(self, item: Any, parameters: Any) -> Prepared[Any]:
        """Encode one item of a request."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSetup:
    """The properties of the model that a task needs.

    Attributes:
        heads: manifest entries of the task's heads, the default head first. Feature extraction has
            none.
        sentence_vectors: default form of embeddings.
    """

    tokenizer: AlbertTokenizer
    max_positions: int
    hidden_size: int
    heads: Mapping[str, HeadEntry] = field(default_factory=dict)
    sentence_vectors: SentenceVectors = field(default_factory=SentenceVectors)

    @property
    def head(self) -> HeadEntry:
        """The default head."""
        return next(iter(self.heads.values()))


def group_by_length(
    lengths: Sequence[int], max_tokens: int, *, max_padding_tokens: float = math.inf
) -> list[list[int]]:
    """Return the indices of sequences in batches of similar lengths, longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return cut_batches(order, lengths, max_tokens, max_padding_tokens=max_padding_tokens)


def cut_batches(
    order: Iterable[int],
    lengths: Sequence[int] | NDArray[Any],
    max_tokens: int,
    *,
    max_padding_tokens: float = math.inf,
) -> list[list[int]]:
    """Cut a list of indices, which is ordered by length, into batches.

    Args:
        order: indices in ascending or descending order of their lengths.
        lengths: number of tokens of each sequence, by index.
        max_tokens: maximum number of tokens in a batch, including padding. A longer sequence is a
            batch by itself.
        max_padding_tokens: maximum number of padding tokens in a batch.
    """
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = num_tokens = 0
    for index in order:
        length = int(lengths[index])
        longest, num_tokens = max(longest, length), num_tokens + length
        padded = (len(batch) + 1) * longest
        if batch and (padded > max_tokens or padded - num_tokens > max_padding_tokens):
            batches.append(batch)
            batch, longest, num_tokens = [], length, length
        batch.append(index)
    return [*batches, batch] if batch else batches


def softmax(logits: Logits) -> NDArray[np.float64]:
    """Return probabilities over the last axis, in the same shape."""
    wide = finite(logits)
    exponentials = np.exp(wide - wide.max(axis=-1, keepdims=True))
    probabilities: NDArray[np.float64] = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Return the logarithms of `softmax`, which are finite even if a probability rounds to 0."""
    wide = finite(logits)
    wide = wide - wide.max(axis=-1, keepdims=True)
    logs: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return logs


def sigmoid(logits: Logits) -> NDArray[np.float64]:
    """Return the probability of each logit, independently of the other logits."""
    probabilities: NDArray[np.float64] = 0.5 * (1.0 + np.tanh(0.5 * finite(logits)))
    return probabilities


def finite(logits: Logits) -> NDArray[np.float64]:
    """Return the logits in double precision, after checking that they are finite."""
    if not np.isfinite(logits).all():
        raise EngineError("The model's logits are not finite. Check the bundle's weights.")
    return logits.astype(np.float64)


def best(scores: NDArray[np.float64], candidates: NDArray[np.int64], top_k: int) -> list[int]:
    """Return the `top_k` candidates with the highest scores, sorted by falling score, then by id.

    Args:
        scores: score of each id (V,).
        candidates: distinct ids to choose from.
    """
    values = scores[candidates]
    if top_k < len(candidates):
        is_large = values >= np.partition(values, -top_k)[-top_k]
        candidates, values = candidates[is_large], values[is_large]
    order = np.lexsort((candidates, -values))[:top_k]
    return [int(candidate) for candidate in candidates[order]]
