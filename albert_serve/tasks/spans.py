"""The most probable spans of a document, from the logits of where an answer starts and ends.

Shape legend: N tokens of the document, C candidate spans.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from albert_serve.tasks.base import Logits
from albert_serve.tasks.probability import softmax


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A range of characters, end excluded, and the probability that it is the answer."""

    start: int
    end: int
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """What a document offers.

    Attributes:
        best: non-empty spans with different ranges, the most probable first.
        no_answer: the probability that there is none.
    """

    best: list[Span]
    no_answer: float


def find_spans(
    logits: Logits, offsets: Sequence[tuple[int, int]], *, max_answer_len: int, top_k: int
) -> Spans:
    """Score every span of at most `max_answer_len` tokens by P(start) * P(end).

    Both are softmaxes over "no answer" and all N tokens, so that the scores of all spans and of
    no answer sum to at most 1. Spans with the same characters are one span; its score is their sum.

    Args:
        logits: (1 + N, 2), "no answer" first; start and end.
        offsets: the characters of each of the N tokens.
        max_answer_len: tokens of the longest span.
        top_k: how many spans are wanted.
    """
    shares = softmax(logits.T)
    starts, ends, scores = _candidates(shares[:, 1:], offsets, max_answer_len)
    # One number for a range of characters, so that equal ranges fall together.
    width = int(ends.max(initial=0)) + 1
    ranges, which = np.unique(starts * width + ends, return_inverse=True)
    sums = np.bincount(which, weights=scores, minlength=len(ranges))
    order = np.argsort(-sums, kind="stable")[:top_k]
    best = [
        Span(
            start=int(ranges[i]) // width,
            end=int(ranges[i]) % width,
            score=min(1.0, float(sums[i])),  # a sum may be over 1 by its rounding
        )
        for i in order
    ]
    return Spans(best=best, no_answer=float(shares[0, 0] * shares[1, 0]))


def _candidates(
    shares: NDArray[np.float64], offsets: Sequence[tuple[int, int]], max_answer_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """First character, end and score of each span that holds a character; (C,) each.

    None begins or ends with a token that stands for white space alone.
    """
    bounds = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    num_tokens = len(bounds)
    filled = bounds[:, 1] > bounds[:, 0]
    parts = []
    for extra in range(min(max_answer_len, num_tokens)):
        starts = bounds[: num_tokens - extra, 0]
        ends = bounds[extra:, 1]
        scores = shares[0, : num_tokens - extra] * shares[1, extra:]
        held = (ends > starts) & filled[: num_tokens - extra] & filled[extra:]
        parts.append((starts[held], ends[held], scores[held]))
    starts, ends, scores = (np.concatenate(part) for part in zip(*parts, strict=True))
    return starts, ends, scores


def align(offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """The offsets widened to the words that they cut.

    A word is a run of letters, marks and digits, so that punctuation stays outside an answer.
    """
    first, last = _word_bounds(text)
    return [
        (first[start], last[end - 1]) if end > start else (start, end) for start, end in offsets
    ]


def _word_bounds(text: str) -> tuple[list[int], list[int]]:
    """For each character the start and the end of its word; itself alone outside words."""
    in_word = [unicodedata.category(character)[0] in "LMN" for character in text]
    first = list(range(len(text)))
    last = list(range(1, len(text) + 1))
    for i in range(1, len(text)):
        if in_word[i] and in_word[i - 1]:
            first[i] = first[i - 1]
    for i in range(len(text) - 2, -1, -1):
        if in_word[i] and in_word[i + 1]:
            last[i] = last[i + 1]
    return first, last


def strip(offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """The offsets without white space at either end; empty where there is nothing else."""
    return [_strip(start, end, text) for start, end in offsets]


def _strip(start: int, end: int, text: str) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end
