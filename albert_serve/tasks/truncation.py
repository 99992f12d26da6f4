"""Truncation of a text or a pair to the model's positions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from albert_serve.api.embeddings import TruncationDirection
from albert_serve.api.schemas import Truncation
from albert_serve.errors import InvalidInputError, TextTooLongError
from albert_serve.tasks.base import EncoderInput, Reduction
from albert_serve.tokenizer import AlbertTokenizer, Encoding

# [CLS], and the [SEP] after a text, or after each text of a pair.
_SPECIAL: Final = 2
_PAIR_SPECIAL: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedEncoding:
    """An encoding that fits the model.

    Attributes:
        encoding: with the special tokens.
        num_truncated: tokens that were cut off.
    """

    encoding: Encoding
    num_truncated: int = 0

    def at_cls(self, task: str) -> EncoderInput:
        """Return the input of a task whose head reads the [CLS] row."""
        return self.at(task, [0])

    def at(self, task: str, rows: list[int] | None, reduction: Reduction = "none") -> EncoderInput:
        """Return the input of a task that reads these rows; None for all."""
        ids, types = self.encoding.ids, self.encoding.types
        return EncoderInput(ids=ids, types=types, task=task, rows=rows, reduction=reduction)


@dataclass(frozen=True, slots=True)
class Truncator:
    """Fits texts to a number of positions: cuts long ones, or refuses them.

    Attributes:
        mode: "truncate" cuts; with "error" a TextTooLongError is raised.
    """

    tokenizer: AlbertTokenizer
    max_positions: int
    mode: Truncation

    def encode(self, text: str) -> Encoding:
        """Encode a text without special tokens; refuse a long one before its encoding is made."""
        if self.mode != "error":
            return self.tokenizer.encode_plain(text)

        def check_length(num_tokens: int) -> None:
            if num_tokens + _SPECIAL > self.max_positions:
                raise self._too_many(num_tokens + _SPECIAL)

        return self.tokenizer.encode_plain(text, check_length)

    def fit_texts(self, text: str, pair: str | None = None) -> FittedEncoding:
        """Encode and fit a text or a pair."""
        return self.fit(self.encode(text), None if pair is None else self.encode(pair))

    def fit(
        self,
        first: Encoding,
        second: Encoding | None = None,
        direction: TruncationDirection = "right",
    ) -> FittedEncoding:
        """Fit encodings without special tokens; the ends are cut, of the longer text first.

        Args:
            direction: the end at which a single text is cut.
        """
        num_special = _SPECIAL if second is None else _PAIR_SPECIAL
        num_tokens = len(first) + (0 if second is None else len(second)) + num_special
        num_excess = num_tokens - self.max_positions
        if num_excess <= 0:
            return FittedEncoding(encoding=self.tokenizer.build(first, second))
        if self.mode == "error":
            raise self._too_many(num_tokens)
        if second is None:
            start = num_excess if direction == "left" else 0
            kept = len(first) - num_excess
            return FittedEncoding(
                encoding=self.tokenizer.build(first.slice(start, start + kept)),
                num_truncated=num_excess,
            )
        room = self.max_positions - num_special
        num_first, num_second = _longest_first(len(first), len(second), room)
        return FittedEncoding(
            encoding=self.tokenizer.build(first.slice(0, num_first), second.slice(0, num_second)),
            num_truncated=num_excess,
        )

    def _too_many(self, num_tokens: int) -> TextTooLongError:
        return TextTooLongError(
            f"the text is {num_tokens} tokens with the special ones, and the model reads at most "
            f"{self.max_positions}; shorten it, or set the parameter truncation to true, which "
            "cuts it"
        )


def check_not_empty(name: str, text: str) -> None:
    """Refuse an empty text, or one of white space alone."""
    if not text.strip():
        raise InvalidInputError(f"{name} is empty; send a text with at least one word")


@contextlib.contextmanager
def named(place: str) -> Iterator[None]:
    """Have the refusal of a text say which of several it is."""
    try:
        yield
    except (TextTooLongError, InvalidInputError) as error:
        raise type(error)(f"{place}: {error}") from error


def _longest_first(num_first: int, num_second: int, room: int) -> tuple[int, int]:
    """Return each text's tokens that fit into `room`, as `tokenizers`' "longest_first" does."""
    half = room // 2
    if min(num_first, num_second) <= half:
        if num_first <= num_second:
            return num_first, room - num_first
        return room - num_second, num_second
    return (room - half, half) if num_first > num_second else (half, room - half)
