"""The interface between tasks and the engine: encoder inputs, their batches, and logits.

Shape legend: R gathered rows, K outputs of the task's head.
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
# The memory of one entry of an answer, without its text: the object, and its part of the reply.
ENTRY_BYTES: Final = 500

_AnswerT_co = TypeVar("_AnswerT_co", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderInput:
    """One unpadded sequence for the encoder, and its gathered positions.

    Attributes:
        ids: token ids, special tokens included.
        types: 0 for the first segment, 1 for the second; as long as `ids`.
        task: the head that reads the rows: a task's name, or `text-classification/NAME`; feature
            extraction has none, and its logits are the hidden states themselves.
        rows: gathered positions, in the order of the logits; None for all.
        reduction: "mean" and "max" replace the logits of all rows by one row. The engine computes
            it, so that the rows of a whole request need not be held.
    """

    ids: list[int]
    types: list[int]
    task: str
    rows: list[int] | None
    reduction: Reduction = "none"

    @property
    def endpoint(self) -> str:
        """The task, whichever of its heads reads the rows."""
        return task_of(self.task)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared(Generic[_AnswerT_co]):
    """An item ready for the engine.

    Attributes:
        inputs: at least one.
        finish: converts the logits, one (R, K) float32 array an input, in order, to the answer.
        num_truncated: tokens that were cut off because the caller allowed it.
        warnings: warnings for the caller.
        answer_bytes: the approximate memory of its answer, where parameters can multiply it.
    """

    inputs: list[EncoderInput]
    finish: Callable[[list[Logits]], _AnswerT_co]
    num_truncated: int = 0
    answer_bytes: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens over all inputs."""
        return sum(len(item.ids) for item in self.inputs)


def inputs_of(prepared: Sequence[Prepared[Any]]) -> list[EncoderInput]:
    """Return the encoder inputs of all items, in order."""
    return [encoder_input for item in prepared for encoder_input in item.inputs]


def finish_all(prepared: Sequence[Prepared[Any]], logits: Sequence[Logits]) -> list[Any]:
    """Return the answer of each item, from the logits of `inputs_of(prepared)`, in order."""
    rest = iter(logits)
    return [item.finish([next(rest) for _ in item.inputs]) for item in prepared]


class Runner(Protocol):
    """The interface of an engine, which forms batches of the inputs itself."""

    @property
    def max_batch_tokens(self) -> int:
        """The limit of tokens, padding included, that run together."""
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
        heads: the task's in the manifest, the default one first; feature extraction has none.
        sentence_vectors: the defaults of feature extraction.
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
    """Return indices in batches of like lengths, longest first; see `cut_batches`."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return cut_batches(order, lengths, max_tokens, max_padding_tokens=max_padding_tokens)


def cut_batches(
    order: Iterable[int],
    lengths: Sequence[int] | NDArray[Any],
    max_tokens: int,
    *,
    max_padding_tokens: float = math.inf,
) -> list[list[int]]:
    """Cut indices, ordered by length, into batches; each index is in one batch.

    Args:
        order: indices in ascending or descending order of their lengths.
        lengths: tokens by index.
        max_tokens: the limit of a batch's tokens, padding included; a longer sequence is alone.
        max_padding_tokens: the limit of a batch's padding tokens.
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
    """Return probabilities over the last axis; same shape."""
    wide = finite(logits)
    exponentials = np.exp(wide - wide.max(axis=-1, keepdims=True))
    probabilities: NDArray[np.float64] = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Return the logarithms of `softmax`, finite for any probability; same shape."""
    wide = finite(logits)
    wide = wide - wide.max(axis=-1, keepdims=True)
    logs: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return logs


def sigmoid(logits: Logits) -> NDArray[np.float64]:
    """Return each logit's own probability; same shape."""
    probabilities: NDArray[np.float64] = 0.5 * (1.0 + np.tanh(0.5 * finite(logits)))
    return probabilities


def finite(logits: Logits) -> NDArray[np.float64]:
    """Return the logits in double precision."""
    if not np.isfinite(logits).all():
        raise EngineError("the model gave logits that are not finite; its weights may be damaged")
    return logits.astype(np.float64)


def best(scores: NDArray[np.float64], candidates: NDArray[np.int64], top_k: int) -> list[int]:
    """Return the `top_k` candidates of the largest scores, largest first; ties by smaller id.

    Args:
        scores: (V,), by id.
        candidates: the ids to choose from, each once.
    """
    values = scores[candidates]
    if top_k < len(candidates):
        within = np.argpartition(-values, top_k - 1)[:top_k]
        candidates, values = candidates[within], values[within]
    order = np.lexsort((candidates, -values))
    return [int(candidate) for candidate in candidates[order]]
