"""The most probable spans of a document, from the logits of an answer's start and end.

Shape legend: N tokens of the document, C candidate spans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.tasks.base import Logits, finite
from albert_serve.tokenizer import word_bounds

# Scores are normalised over this number of spans, as in BERT's original n-best list.
NUM_BEST: Final = 20
# Number of spans in memory at a time. 512 spans for each of 100,000 tokens would take gigabytes.
_MAX_CANDIDATES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A range of characters, end excluded.

    Attributes:
        logit: start logit + end logit. If several spans of tokens have these characters, this is
            the log-sum-exp of their logits.
    """

    start: int
    end: int
    logit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The spans of a document.

    Attributes:
        best: non-empty spans with different ranges, most probable first. There are at least
            `NUM_BEST`, if the document has as many.
        no_answer: start logit + end logit of "no answer".
    """

    best: list[Span]
    no_answer: float

    @property
    def null_score(self) -> float:
        """The logit of "no answer" minus the best span's, or infinity if there is no span."""
        return self.no_answer - self.best[0].logit if self.best else math.inf

    def scores(self, threshold: float) -> tuple[list[float], float]:
        """Return the scores of the best spans, and of "no answer".

        Scores are a softmax of the logits over the `NUM_BEST` best spans and "no answer", like the
        "probability" in the n-best list of the original BERT and ALBERT code.

        Args:
            threshold: null score above which "no answer" has the highest score.
        """
        logits = np.array([self.no_answer - threshold, *(span.logit for span in self.best)])
        weights = np.exp(logits - logits.max())
        no_answer, *scores = (weights / weights[: 1 + NUM_BEST].sum()).tolist()
        return scores, no_answer


def find_spans(
    logits: Logits, offsets: Sequence[tuple[int, int]], *, max_answer_len: int, top_k: int
) -> Spans:
    """Find the spans of at most `max_answer_len` tokens with the highest start + end logits.

    Args:
        logits: start and end logits (1 + N, 2), those of "no answer" first.
        offsets: character range of each token.
        max_answer_len: maximum number of tokens in a span.
        top_k: number of spans to return, if more than `NUM_BEST`.
    """
    wide = finite(logits)
    top_k = max(top_k, NUM_BEST)
    bounds = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    tokens = _Tokens(
        starts=wide[1:, 0], ends=wide[1:, 1], bounds=bounds, max_answer_len=max_answer_len
    )
    highest = tokens.highest_logit()
    # A range of characters is encoded as one number, so that equal ranges are equal numbers.
    width = int(bounds.max(initial=0)) + 1
    ranges, sums = np.zeros(0, dtype=np.int64), np.zeros(0)
    num_firsts = max(1, _MAX_CANDIDATES // min(max_answer_len, max(1, len(bounds))))
    for first in range(0, len(bounds), num_firsts):
        firsts = slice(first, first + num_firsts)
        span_ranges, span_logits = tokens.candidates(firsts, width)
        weights = np.exp(span_logits - highest)
        ranges, sums = _sum_by_range(
            np.concatenate([ranges, span_ranges]), np.concatenate([sums, weights])
        )
        if firsts.stop < len(bounds):
            # Later spans start at or after the next token, so the sums before it are complete.
            complete = int(np.searchsorted(ranges, bounds[firsts.stop, 0] * width))
            ranges, sums = _drop_worst(ranges, sums, complete, top_k)
    order = np.argsort(-sums, kind="stable")[:top_k]
    with np.errstate(divide="ignore"):  # a weight of 0 has the logit -inf
        range_logits = highest + np.log(sums[order])
    best = [
        Span(start=int(ranges[i]) // width, end=int(ranges[i]) % width, logit=logit)
        for i, logit in zip(order, range_logits.tolist(), strict=True)
    ]
    return Spans(best=best, no_answer=float(wide[0].sum()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tokens:
    """The tokens of a document.

    Attributes:
        starts: logit of an answer's start at each token (N,).
        ends: logit of an answer's end at each token (N,).
        bounds: character range of each token (N, 2).
        max_answer_len: maximum number of tokens in a span.
    """

    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    bounds: NDArray[np.int64]
    max_answer_len: int

    def highest_logit(self) -> float:
        """Return the highest start + end logit of a span, or -inf if there is no span."""
        pairs = self._pairs(slice(0, len(self.bounds)))
        return max(
            (
                float((self.starts[first] + self.ends[last]).max(initial=-np.inf, where=is_span))
                for first, last, is_span in pairs
            ),
            default=-np.inf,
        )

    def candidates(
        self, firsts: slice, width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return each span's range, as one number (C,), and its logit (C,).

        Args:
            firsts: first tokens of the spans.
            width: factor of a range's start in its number.
        """
        ranges, logits = [], []
        for first, last, is_span in self._pairs(firsts):
            ranges.append((self.bounds[first, 0] * width + self.bounds[last, 1])[is_span])
            logits.append((self.starts[first] + self.ends[last])[is_span])
        return np.concatenate(ranges), np.concatenate(logits)

    def _pairs(self, firsts: slice) -> Iterator[tuple[slice, slice, NDArray[np.bool_]]]:
        """Yield, for each length, the first tokens, the last tokens, and whether these form spans.

        A span is not empty, and does not begin or end with a token of white space.
        """
        num_tokens = len(self.bounds)
        filled = self.bounds[:, 1] > self.bounds[:, 0]
        for extra in range(min(self.max_answer_len, num_tokens)):
            num_firsts = max(0, min(firsts.stop, num_tokens - extra) - firsts.start)
            first = slice(firsts.start, firsts.start + num_firsts)
            last = slice(first.start + extra, first.stop + extra)
            is_long = self.bounds[last, 1] > self.bounds[first, 0]
            yield first, last, is_long & filled[first] & filled[last]


def _sum_by_range(
    ranges: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return each range once, in order, and the sum of its weights."""
    unique_ranges, indices = np.unique(ranges, return_inverse=True)
    sums = np.bincount(indices, weights=weights, minlength=len(unique_ranges))
    return unique_ranges, sums.astype(np.float64)


def _drop_worst(
    ranges: NDArray[np.int64], sums: NDArray[np.float64], num_complete: int, top_k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the best complete ranges and all incomplete ranges, in order, with their sums."""
    best = np.sort(np.argsort(-sums[:num_complete], kind="stable")[:top_k])
    remaining = np.concatenate([best, np.arange(num_complete, len(sums))])
    return ranges[remaining], sums[remaining]


def align(offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Return the offsets extended to whole words.

    A word is a run of letters, marks and digits, so punctuation stays outside an answer. In scripts
    without spaces between words, a word is one letter with its marks, so answers are not extended.
    """
    first, last = word_bounds(text)
    return [
        (first[start], last[end - 1]) if end > start else (start, end) for start, end in offsets
    ]


def strip(offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Return the offsets without white space at either end; ranges of white space become empty."""
    return [_strip(start, end, text) for start, end in offsets]


def _strip(start: int, end: int, text: str) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end
