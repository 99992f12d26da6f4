"""The most probable spans of a document, from the logits of an answer's start and end.

Shape legend: N tokens of the document, C candidate spans.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.tasks.base import Logits
from albert_serve.tasks.probability import softmax

# The limit of candidates in memory: 512 for each of 100,000 tokens would take gigabytes.
_MAX_HELD: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A range of characters, end excluded, and the probability that it is the answer."""

    start: int
    end: int
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The spans of a document.

    Attributes:
        best: non-empty spans with different ranges, the most probable first.
        no_answer: the probability that there is no answer.
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
        top_k: the number of spans to return.
    """
    probabilities = softmax(logits.T)
    bounds = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    # A range of characters is encoded as one number, so that equal ranges are equal numbers.
    width = int(bounds.max(initial=0)) + 1
    ranges, sums = np.zeros(0, dtype=np.int64), np.zeros(0)
    num_firsts = max(1, _MAX_HELD // min(max_answer_len, max(1, len(bounds))))
    for first in range(0, len(bounds), num_firsts):
        firsts = slice(first, first + num_firsts)
        more, scores = _candidates(probabilities[:, 1:], bounds, firsts, max_answer_len, width)
        ranges, sums = _summed(np.concatenate([ranges, more]), np.concatenate([sums, scores]))
        if firsts.stop < len(bounds):
            # The next candidates may add to the sums of ranges from here on.
            complete = int(np.searchsorted(ranges, bounds[firsts.stop, 0] * width))
            ranges, sums = _kept(ranges, sums, complete, top_k)
    order = np.argsort(-sums, kind="stable")[:top_k]
    best = [
        Span(
            start=int(ranges[i]) // width,
            end=int(ranges[i]) % width,
            score=min(1.0, float(sums[i])),  # rounding may raise a sum over 1
        )
        for i in order
    ]
    return Spans(best=best, no_answer=float(probabilities[0, 0] * probabilities[1, 0]))


def _candidates(
    probabilities: NDArray[np.float64],
    bounds: NDArray[np.int64],
    firsts: slice,
    max_answer_len: int,
    width: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the range, as one number, and the score of each non-empty span; (C,) each.

    No span begins or ends with a token of white space alone.

    Args:
        firsts: the first tokens of the spans.
    """
    num_tokens = len(bounds)
    filled = bounds[:, 1] > bounds[:, 0]
    ranges, scores = [], []
    for extra in range(min(max_answer_len, num_tokens)):
        num_firsts = max(0, min(firsts.stop, num_tokens - extra) - firsts.start)
        first = slice(firsts.start, firsts.start + num_firsts)
        last = slice(first.start + extra, first.stop + extra)
        starts, ends = bounds[first, 0], bounds[last, 1]
        held = (ends > starts) & filled[first] & filled[last]
        ranges.append((starts * width + ends)[held])
        scores.append((probabilities[0, first] * probabilities[1, last])[held])
    return np.concatenate(ranges), np.concatenate(scores)


def _summed(
    ranges: NDArray[np.int64], scores: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return each range once, in order, and the sum of its scores."""
    different, which = np.unique(ranges, return_inverse=True)
    sums = np.bincount(which, weights=scores, minlength=len(different))
    return different, sums.astype(np.float64)


def _kept(
    ranges: NDArray[np.int64], sums: NDArray[np.float64], num_complete: int, top_k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the best complete ranges and all incomplete ones, in order."""
    best = np.sort(np.argsort(-sums[:num_complete], kind="stable")[:top_k])
    kept = np.concatenate([best, np.arange(num_complete, len(sums))])
    return ranges[kept], sums[kept]


def align(offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Return the offsets widened to whole words.

    A word is a run of letters, marks and digits, so that punctuation stays outside an answer.
    """
    first, last = _word_bounds(text)
    return [
        (first[start], last[end - 1]) if end > start else (start, end) for start, end in offsets
    ]


def _word_bounds(text: str) -> tuple[list[int], list[int]]:
    """Return the start and end of each character's word; outside words of the character itself."""
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
    """Return the offsets without white space at either end; empty if there is nothing else."""
    return [_strip(start, end, text) for start, end in offsets]


def _strip(start: int, end: int, text: str) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end
