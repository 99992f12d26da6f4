"""N-gram masking of whole words (paper, section 4.1; create_pretraining_data.py of the original).

Spans of n words, p(n) proportional to 1/n for n up to 3, are chosen until 15 % of the tokens
are predicted; of those 80 % become [MASK], 10 % a random piece, 10 % stay. Unlike in the original,
random pieces are never special tokens, and spans do not cross a [SEP].
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.tokenizer import SPECIAL_TOKENS, AlbertTokenizer

NUM_SPECIAL: Final = len(SPECIAL_TOKENS)
_MASK_ID: Final = SPECIAL_TOKENS.index("[MASK]")
_LATIN: Final = frozenset(string.ascii_lowercase + string.punctuation)


@dataclass(frozen=True, kw_only=True)
class NgramMasking:
    """N-gram masking of whole words.

    Attributes:
        word_starts: (V,) bool, whether a piece begins a word.
        rate: fraction of the tokens, with special tokens, that is predicted.
        max_words: longest span, in words.
    """

    word_starts: NDArray[np.bool_]
    rate: float = 0.15
    max_words: int = 3

    def __call__(
        self, ids: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Mask one sequence of ids (S,), and rank the masks.

        Returns:
            The ids with replacements (S,), the positions to predict in ascending order, and the
            rate from which on each position is among them: at most `rate`, and 0 for the first
            span.
        """
        chosen, rates = self._choose(ids, rng)
        masked = ids.copy()
        fate = rng.random(len(chosen))
        masked[chosen[fate < 0.8]] = _MASK_ID
        swapped = chosen[fate >= 0.9]
        masked[swapped] = rng.integers(NUM_SPECIAL, len(self.word_starts), len(swapped))
        return masked, chosen, rates

    def _choose(
        self, ids: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        begins, ends = word_bounds(ids, self.word_starts)
        rates = np.full(len(ids), np.inf)
        if not len(begins):
            return np.zeros(0, np.int64), np.zeros(0)
        odds = 1 / np.arange(1, self.max_words + 1)
        order = rng.permutation(len(begins))
        num_words = rng.choice(self.max_words, len(begins), p=odds / odds.sum()) + 1
        # A span that would run past a special token ends before it.
        lasts = np.minimum(order + num_words - 1, _last_neighbours(begins, ends)[order])
        whole = budget = max(1, round(self.rate * len(ids)))
        begin_of, end_of, taken = begins.tolist(), ends.tolist(), bytearray(len(ids))
        for word, last in zip(order.tolist(), lasts.tolist(), strict=True):
            begin = begin_of[word]
            # A span over the budget is shortened; a span that overlaps another is skipped.
            while last >= word and end_of[last] - begin > budget:
                last -= 1
            if last >= word and not any(taken[begin : end_of[last]]):
                size = end_of[last] - begin
                taken[begin : end_of[last]] = bytes([1]) * size
                # A lower rate has the spans of which at least half is within its budget.
                is_first = budget == whole
                rates[begin : end_of[last]] = 0 if is_first else whole - budget + size / 2
                budget -= size
                if not budget:
                    break
        chosen = np.flatnonzero(np.frombuffer(taken, np.uint8))
        return chosen, rates[chosen] / len(ids)


def _last_neighbours(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each word, the last one that follows it without a special token between."""
    breaks = np.flatnonzero(begins[1:] != ends[:-1])
    return np.append(breaks, len(begins) - 1)[np.searchsorted(breaks, np.arange(len(begins)))]


def word_bounds(
    ids: NDArray[np.int64], word_starts: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the begin and end of each word in ids (S,); special tokens belong to none."""
    special = ids < NUM_SPECIAL
    after_special = np.concatenate([[True], special[:-1]])
    begins = np.flatnonzero((word_starts[ids] | after_special) & ~special)
    stops = np.append(np.flatnonzero(special), len(ids))
    ends = np.minimum(np.append(begins[1:], len(ids)), stops[np.searchsorted(stops, begins)])
    return begins, ends


def word_starts(tokenizer: AlbertTokenizer) -> NDArray[np.bool_]:
    """Return for each id whether its piece begins a word, by the original code's rule.

    A piece does if it begins with "▁" or "<", is one punctuation mark, or has a character other
    than a lower-case Latin letter or punctuation.
    """
    pieces = map(tokenizer.token, range(tokenizer.vocab_size))
    return np.array([_starts_word(piece) for piece in pieces])


def _starts_word(piece: str) -> bool:
    return (
        piece.startswith(("▁", "<"))
        or not _LATIN.issuperset(piece)
        or (len(piece) == 1 and piece in string.punctuation)
    )
