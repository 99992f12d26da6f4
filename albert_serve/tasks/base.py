"""What a task hands to the engine, and what it makes of the numbers that come back.

Shape legend: R rows asked for, K outputs of the task's head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
# Of one entry of an answer, without its text: the object, and its part of the reply.
ENTRY_BYTES: Final = 500

AnswerT_co = TypeVar("AnswerT_co", covariant=True)
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
ParametersT_contra = TypeVar("ParametersT_contra", contravariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderInput:
    """One unpadded sequence for the encoder, and the rows of it that a head shall read.

    Attributes:
        ids: token ids, special tokens included.
        types: 0 for the first segment, 1 for the second; as long as `ids`.
        task: the task whose head reads the rows.
        rows: positions whose logits are wanted, in this order; None for all.
    """

    ids: list[int]
    types: list[int]
    task: str
    rows: list[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Round(Generic[AnswerT_co]):
    """What the engine has to run for an item, and what comes of it.

    Attributes:
        inputs: what the engine has to run, at least one.
        finish: turns the logits, one (R, K) float32 array an input, in order, into the answer; or
            into a further round, where the answer depends on inputs that these logits decide.
    """

    inputs: list[EncoderInput]
    finish: Callable[[list[Logits]], AnswerT_co | Round[AnswerT_co]]

    @property
    def num_tokens(self) -> int:
        """Tokens over all inputs."""
        return sum(len(given.ids) for given in self.inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared(Round[AnswerT_co]):
    """An item ready for the engine: its first round, and for most tasks the only one.

    Attributes:
        num_truncated: tokens that were left out because the caller allowed it.
        warnings: what the reply must tell the caller.
        num_round_tokens: tokens of its widest round, at most.
        num_wide_rows: rows of logits as wide as the vocabulary that it needs at once, at most; an
            answer stands on all of them, so that they are held together.
        num_held_bytes: what its answer, and the way to it, take of memory, about.
    """

    num_truncated: int = 0
    num_round_tokens: int = 0
    num_wide_rows: int = 0
    num_held_bytes: int = 0
    warnings: list[str] = field(default_factory=list)


class Task(Protocol[ItemT_contra, ParametersT_contra, AnswerT_co]):
    """One endpoint's logic, free of any runtime."""

    def prepare(self, item: ItemT_contra, parameters: ParametersT_contra) -> Prepared[AnswerT_co]:
        """Encode one item.

        Raises:
            InvalidInputError: the item cannot be answered.
        """
        ...
