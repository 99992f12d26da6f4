"""N-gram masking of whole words (paper, section 4.1; create_pretraining_data.py of the original).

Spans of n words, p(n) proportional to 1/n for n up to 3, are chosen until 15 % of the tokens
are predicted; of those 80 % become [MASK], 10 % a random piece, 10 % stay. Unlike in the original,
random pieces are never special tokens, and spans do not cross a [SEP].
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.tokenizer import ALBERT_IDS, AlbertTokenizer, SpecialIds, is_spaceless

_LATIN: Final = frozenset(string.ascii_lowercase + string.punctuation)


@dataclass(frozen=True, kw_only=True)
class NgramMasking:
    """N-gram masking of whole words.

    Attributes:
        word_starts: (V,) bool, whether a piece begins a word.
        special: the special tokens of the vocabulary.
        rate: fraction of the tokens, with special tokens, that is predicted.
        max_words: longest span, in words.
    """

    word_starts: NDArray[np.bool_]
    special: SpecialIds = ALBERT_IDS
    rate: float = 0.15
    max_words: int = 3

    @classmethod
    def of(cls, tokenizer: AlbertTokenizer, rate: float = 0.15) -> NgramMasking:
        """Return the masking of a vocabulary."""
        return cls(word_starts=word_starts(tokenizer), special=tokenizer.special, rate=rate)

    @cached_property
    def is_special(self) -> NDArray[np.bool_]:
        """Whether an id is of a special token; (V,)."""
        return np.isin(np.arange(len(self.word_starts)), list(self.special.every))

    @cached_property
    def _ordinary(self) -> NDArray[np.int64]:
        return np.flatnonzero(~self.is_special)

    def __call__(
        self, ids: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Mask one sequence of ids (S,).

        Returns:
            The ids with replacements (S,), and the positions to predict in ascending order.
        """
        chosen = self._choose(ids, rng)
        masked = ids.copy()
        fate = rng.random(len(chosen))
        masked[chosen[fate < 0.8]] = self.special.mask
        swapped = chosen[fate >= 0.9]
        masked[swapped] = self._ordinary[rng.integers(0, len(self._ordinary), len(swapped))]
        return masked, chosen

    def _choose(self, ids: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        begins, ends = word_bounds(ids, self.word_starts, self.is_special)
        if not len(begins):
            return np.zeros(0, np.int64)
        odds = 1 / np.arange(1, self.max_words + 1)
        order = rng.permutation(len(begins))
        num_words = rng.choice(self.max_words, len(begins), p=odds / odds.sum()) + 1
        # A span that would run past a special token ends before it.
        lasts = np.minimum(order + num_words - 1, _last_neighbours(begins, ends)[order])
        budget = max(1, round(self.rate * len(ids)))
        begin_of, end_of, taken = begins.tolist(), ends.tolist(), bytearray(len(ids))
        for word, last in zip(order.tolist(), lasts.tolist(), strict=True):
            begin = begin_of[word]
            # A span over the budget is shortened; a span that overlaps another is skipped.
            while last >= word and end_of[last] - begin > budget:
                last -= 1
            if last >= word and not any(taken[begin : end_of[last]]):
                size = end_of[last] - begin
                taken[begin : end_of[last]] = bytes([1]) * size
                budget -= size
                if not budget:
                    break
        return np.flatnonzero(np.frombuffer(taken, np.uint8))


def _last_neighbours(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each word, the last one that follows it without a special token between."""
    breaks = np.flatnonzero(begins[1:] != ends[:-1])
    return np.append(breaks, len(begins) - 1)[np.searchsorted(breaks, np.arange(len(begins)))]


def word_bounds(
    ids: NDArray[np.int64], word_starts: NDArray[np.bool_], is_special: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the begin and end of each word in ids (S,); special tokens belong to none."""
    special = is_special[ids]
    after_special = np.concatenate([[True], special[:-1]])
    begins = np.flatnonzero((word_starts[ids] | after_special) & ~special)
    stops = np.append(np.flatnonzero(special), len(ids))
    ends = np.minimum(np.append(begins[1:], len(ids)), stops[np.searchsorted(stops, begins)])
    return begins, ends


def word_starts(tokenizer: AlbertTokenizer) -> NDArray[np.bool_]:
    """Return for each id whether its piece begins a word, by the original code's rule.

    A piece does if the vocabulary's notation says so or it begins with "<", if it is one
    punctuation mark, or if it has a character other than a letter of its words or punctuation:
    lower-case Latin, and what else stands beside letters in its pieces. A language without spaces
    has no such letters, so that each of its pieces is a word.
    """
    pieces = [tokenizer.token(token_id) for token_id in range(tokenizer.vocab_size)]
    surfaces = [tokenizer.surface(piece) for piece in pieces]
    letters = _LATIN | _letters_of_words(surfaces)
    return np.array(
        [
            tokenizer.begins_word(piece)
            or piece.startswith("<")
            or not letters.issuperset(surface)
            or (len(surface) == 1 and surface in string.punctuation)
            for piece, surface in zip(pieces, surfaces, strict=True)
        ]
    )


def _letters_of_words(surfaces: Sequence[str]) -> set[str]:
    letters: set[str] = set()
    for surface in surfaces:
        others = {char for char in surface if char not in _LATIN and _is_letter(char)}
        if len(surface) > 1:
            letters |= others
    return letters


def _is_letter(char: str) -> bool:
    return unicodedata.category(char)[0] in "LM" and not is_spaceless(char)
