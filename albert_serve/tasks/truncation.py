"""Truncation of a text or a pair to the model's positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from albert_serve.api.embeddings import TruncationDirection
from albert_serve.api.schemas import Truncation
from albert_serve.errors import TextTooLongError
from albert_serve.tasks.base import EncoderInput
from albert_serve.tokenizer import AlbertTokenizer, Encoding

# [CLS], and the [SEP] after a text, or after each text of a pair.
_SPECIAL: Final = 2
_PAIR_SPECIAL: Final = 3
# Tokens of a choice with its question that are kept in any case.
_CHOICE_TOKENS: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """An encoding that fits the model.

    Attributes:
        encoding: with the special tokens.
        num_truncated: tokens that were cut off.
        cut_at: of each text, the offset of the first character that was cut off; None if it is
            whole.
    """

    encoding: Encoding
    num_truncated: int
    cut_at: tuple[int | None, ...] = (None, None)

    def at_cls(self, task: str) -> EncoderInput:
        """Return the input of a task whose head reads the [CLS] row."""
        return self.at(task, [0])

    def at(self, task: str, rows: list[int]) -> EncoderInput:
        """Return the input of a task whose head reads these rows."""
        ids, types = self.encoding.ids, self.encoding.types
        return EncoderInput(ids=ids, types=types, task=task, rows=rows)

    def cuts(self, *places: str) -> dict[str, int]:
        """Return the offsets of `cut_at` by the places of the texts, of those that were cut."""
        offsets = zip(places, self.cut_at, strict=False)
        return {place: offset for place, offset in offsets if offset is not None}


def fit(
    tokenizer: AlbertTokenizer,
    text: str,
    pair: str | None,
    *,
    max_positions: int,
    truncation: Truncation,
) -> Fitted:
    """Encode a text or a pair; if allowed, cut the ends of long texts, the longer one first.

    Raises:
        TextTooLongError: the text does not fit, and `truncation` is "error".
    """
    return fit_encodings(
        tokenizer,
        encode(tokenizer, text, max_positions, truncation),
        None if pair is None else encode(tokenizer, pair, max_positions, truncation),
        max_positions=max_positions,
        truncation=truncation,
    )


def encode(
    tokenizer: AlbertTokenizer, text: str, max_positions: int, truncation: Truncation
) -> Encoding:
    """Encode a text without special tokens; refuse a long one before its encoding is made.

    Raises:
        TextTooLongError: it cannot fit, and `truncation` is "error".
    """
    if truncation != "error":
        return tokenizer.encode_plain(text)
    if tokenizer.least_num_tokens(text) > max_positions:  # a million characters take a second
        raise TextTooLongError(_too_long(f"over {max_positions} tokens", max_positions))

    def check_length(num_tokens: int) -> None:
        if num_tokens + _SPECIAL > max_positions:
            raise TextTooLongError(_too_long(_with_special(num_tokens + _SPECIAL), max_positions))

    return tokenizer.encode_plain(text, check_length)


def fit_encodings(
    tokenizer: AlbertTokenizer,
    first: Encoding,
    second: Encoding | None,
    *,
    max_positions: int,
    truncation: Truncation,
    direction: TruncationDirection = "right",
) -> Fitted:
    """Fit texts that are encoded already, without special tokens; see `fit`.

    Args:
        direction: the end at which a single text is cut.

    Raises:
        TextTooLongError: the texts do not fit, and `truncation` is "error".
    """
    num_special = _SPECIAL if second is None else _PAIR_SPECIAL
    num_tokens = len(first) + (0 if second is None else len(second)) + num_special
    num_excess = num_tokens - max_positions
    if num_excess <= 0:
        return Fitted(encoding=tokenizer.build(first, second), num_truncated=0)
    if truncation == "error":
        raise TextTooLongError(_too_long(_with_special(num_tokens), max_positions))
    if second is None:
        start = num_excess if direction == "left" else 0
        kept = len(first) - num_excess
        return Fitted(
            encoding=tokenizer.build(first.slice(start, start + kept)),
            num_truncated=num_excess,
            cut_at=(first.offsets[start][0] if start else cut_at(first, kept),),
        )
    num_first, num_second = _longest_first(len(first), len(second), max_positions - num_special)
    return Fitted(
        encoding=tokenizer.build(first.slice(0, num_first), second.slice(0, num_second)),
        num_truncated=num_excess,
        cut_at=(cut_at(first, num_first), cut_at(second, num_second)),
    )


def fit_choice(
    tokenizer: AlbertTokenizer,
    context: Encoding,
    choice: Encoding,
    *,
    max_positions: int,
    truncation: Truncation,
) -> Fitted:
    """Fit a context and one choice of a question; if allowed, cut them as `split_choice` says.

    Of the choice, `cut_at` is the offset of the first character that is kept.

    Raises:
        TextTooLongError: they do not fit, and `truncation` is "error".
    """
    num_excess = len(context) + len(choice) + _PAIR_SPECIAL - max_positions
    if num_excess > 0 and truncation == "error":
        length = _with_special(num_excess + max_positions)
        raise TextTooLongError(_too_long(length, max_positions))
    num_context, num_choice = split_choice(len(context), len(choice), max_positions)
    begin = len(choice) - num_choice
    return Fitted(
        encoding=tokenizer.build(context.slice(0, num_context), choice.slice(begin, len(choice))),
        num_truncated=max(num_excess, 0),
        cut_at=(cut_at(context, num_context), choice.offsets[begin][0] if begin else None),
    )


def split_choice(num_context: int, num_choice: int, max_positions: int) -> tuple[int, int]:
    """Return the tokens of a context, its first, and of a choice, its last, that fit the positions.

    The context is cut first. Of a choice, which has its question before it, the last 128 tokens, or
    half of fewer positions, are kept in any case (the original's run_race).
    """
    room = max_positions - _PAIR_SPECIAL
    reserved = min(_CHOICE_TOKENS, room // 2)
    num_choice = min(num_choice, max(reserved, room - num_context))
    return min(num_context, room - num_choice), num_choice


def cut_at(encoding: Encoding, num_kept: int) -> int | None:
    """Return the offset of the first character after `num_kept` tokens; None if there is none."""
    return encoding.offsets[num_kept][0] if num_kept < len(encoding) else None


def _with_special(num_tokens: int) -> str:
    return f"{num_tokens} tokens with the special ones"


def _too_long(length: str, max_positions: int) -> str:
    return (
        f"the text is {length}, and the model reads at most {max_positions}; shorten it, or set "
        "the parameter truncation to true, which cuts it"
    )


def _longest_first(num_first: int, num_second: int, room: int) -> tuple[int, int]:
    """Return each text's tokens that fit into `room`, as `tokenizers`' "longest_first" does."""
    half = room // 2
    if min(num_first, num_second) <= half:
        if num_first <= num_second:
            return num_first, room - num_first
        return room - num_second, num_second
    return (room - half, half) if num_first > num_second else (half, room - half)
