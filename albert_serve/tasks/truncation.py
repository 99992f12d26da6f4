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

# Numbers of special tokens: [CLS] begins a sequence, and [SEP] ends each of its texts.
_SPECIAL: Final = 2
_PAIR_SPECIAL: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedEncoding:
    """An encoding that fits the model.

    Attributes:
        encoding: tokens, including special tokens.
        num_truncated: number of truncated tokens.
    """

    encoding: Encoding
    num_truncated: int = 0

    def cls_input(self, task: str) -> EncoderInput:
        """Return the input of a task whose head reads the [CLS] row."""
        return self.input_for_rows(task, [0])

    def input_for_rows(
        self, task: str, rows: list[int] | None, reduction: Reduction = "none"
    ) -> EncoderInput:
        """Return the input of a task that reads these rows, or all rows if they are None."""
        ids, types = self.encoding.ids, self.encoding.types
        return EncoderInput(ids=ids, types=types, task=task, rows=rows, reduction=reduction)


@dataclass(frozen=True, slots=True)
class Truncator:
    """An encoder that truncates or rejects texts with more tokens than the model has positions.

    Attributes:
        mode: "truncate" to remove tokens, or "error" to raise a TextTooLongError.
    """

    tokenizer: AlbertTokenizer
    max_positions: int
    mode: Truncation

    def encode(self, text: str) -> Encoding:
        """Encode a text without special tokens, or reject a long text early, which saves time."""
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
        """Truncate encodings and add special tokens. A pair loses tokens of its longer text first.

        Args:
            direction: end at which a single text is truncated.
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
            stop = start + len(first) - num_excess
            return FittedEncoding(
                encoding=self.tokenizer.build(first.slice(start, stop)),
                num_truncated=num_excess,
            )
        max_tokens = self.max_positions - num_special
        num_first, num_second = _longest_first(len(first), len(second), max_tokens)
        return FittedEncoding(
            encoding=self.tokenizer.build(first.slice(0, num_first), second.slice(0, num_second)),
            num_truncated=num_excess,
        )

    def _too_many(self, num_tokens: int) -> TextTooLongError:
        return TextTooLongError(
            f"The text has {num_tokens} tokens, including special tokens; the model reads at most "
            f"{self.max_positions}. Shorten the text or set truncation to true."
        )


def check_not_empty(name: str, text: str) -> None:
    """Reject a text that is empty or white space."""
    if not text.strip():
        raise InvalidInputError(f"{name} is empty. Send a text with at least one word.")


@contextlib.contextmanager
def prefix_errors(path: str) -> Iterator[None]:
    """Prefix an error about a text with the text's path in the request."""
    try:
        yield
    except (TextTooLongError, InvalidInputError) as error:
        raise type(error)(f"{path}: {error}") from error


def _longest_first(num_first: int, num_second: int, max_tokens: int) -> tuple[int, int]:
    """Return the number of tokens to keep of each text, as `tokenizers`' "longest_first" does."""
    half = max_tokens // 2
    if min(num_first, num_second) <= half:
        if num_first <= num_second:
            return num_first, max_tokens - num_first
        return max_tokens - num_second, num_second
    return (max_tokens - half, half) if num_first > num_second else (half, max_tokens - half)
