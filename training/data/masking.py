"""N-gram masking of whole words (paper, section 4.1; create_pretraining_data.py of the original).

Spans of 1 to 3 words, n words with probability proportional to 1/n, are chosen until they contain
15 % of the tokens. Of these tokens, 80 % become [MASK], 10 % a random piece, and 10 % stay. Unlike
in the original, random pieces are never special tokens, and spans do not cross a [SEP].
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
        word_starts: whether each piece begins a word (V,).
        special: special tokens of the vocabulary.
        rate: fraction of the tokens to predict, with special tokens in the total.
        max_words: maximum number of words in a span.
    """

    word_starts: NDArray[np.bool_]
    special: SpecialIds = ALBERT_IDS
    rate: float = 0.15
    max_words: int = 3

    @classmethod
    def of(cls, tokenizer: AlbertTokenizer, rate: float = 0.15) -> NgramMasking:
        """Return the masking for a tokenizer's vocabulary."""
        return cls(word_starts=word_starts(tokenizer), special=tokenizer.special, rate=rate)

    @cached_property
    def is_special(self) -> NDArray[np.bool_]:
        """Whether each id is a special token (V,)."""
        return np.isin(np.arange(len(self.word_starts)), list(self.special.all_ids))

    @cached_property
    def _ordinary(self) -> NDArray[np.int64]:
        return np.flatnonzero(~self.is_special)

    def __call__(
        self, ids: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Mask one sequence of ids (S,).

        Returns:
            Masked ids (S,), and the positions to predict (N,) in ascending order.
        """
        chosen = self._choose(ids, rng)
        masked_ids = ids.copy()
        draws = rng.random(len(chosen))
        masked_ids[chosen[draws < 0.8]] = self.special.mask
        swapped = chosen[draws >= 0.9]
        masked_ids[swapped] = self._ordinary[rng.integers(0, len(self._ordinary), len(swapped))]
        return masked_ids, chosen

    def _choose(self, ids: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        begins, ends = word_bounds(ids, self.word_starts, self.is_special)
        if not len(begins):
            return np.zeros(0, np.int64)
        odds = 1 / np.arange(1, self.max_words + 1)
        order = rng.permutation(len(begins))
        num_words = rng.choice(self.max_words, len(begins), p=odds / odds.sum()) + 1
        # A span ends before a special token.
        lasts = np.minimum(order + num_words - 1, _last_neighbours(begins, ends)[order])
        budget = max(1, round(self.rate * len(ids)))
        begin_of, end_of, is_chosen = begins.tolist(), ends.tolist(), bytearray(len(ids))
        for word, last in zip(order.tolist(), lasts.tolist(), strict=True):
            begin = begin_of[word]
            # A span that exceeds the budget is shortened. A span that overlaps another is skipped.
            while last >= word and end_of[last] - begin > budget:
                last -= 1
            if last >= word and not any(is_chosen[begin : end_of[last]]):
                size = end_of[last] - begin
                is_chosen[begin : end_of[last]] = bytes([1]) * size
                budget -= size
                if not budget:
                    break
        return np.flatnonzero(np.frombuffer(is_chosen, np.uint8))


def _last_neighbours(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each word, the index of the last word before the next special token (W,)."""
    breaks = np.flatnonzero(begins[1:] != ends[:-1])
    return np.append(breaks, len(begins) - 1)[np.searchsorted(breaks, np.arange(len(begins)))]


def word_bounds(
    ids: NDArray[np.int64], word_starts: NDArray[np.bool_], is_special: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the begins (W,) and ends (W,) of the words in ids (S,), excluding special tokens."""
    special = is_special[ids]
    after_special = np.concatenate([[True], special[:-1]])
    begins = np.flatnonzero((word_starts[ids] | after_special) & ~special)
    stops = np.append(np.flatnonzero(special), len(ids))
    ends = np.minimum(np.append(begins[1:], len(ids)), stops[np.searchsorted(stops, begins)])
    return begins, ends


def word_starts(tokenizer: AlbertTokenizer) -> NDArray[np.bool_]:
    """Return whether each piece begins a word (V,), by the original code's rule.

    A piece begins a word if any of these is true:

    - The vocabulary's notation marks it, or it begins with "<".
    - It is one punctuation mark.
    - It has a character that is neither punctuation nor a letter of words. Letters of words are
      lower-case Latin and the letters in pieces of two or more characters. Scripts without spaces
      have no such letters, so each of their pieces is a word.
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
        if len(surface) > 1:
            letters |= {char for char in surface if char not in _LATIN and _is_letter(char)}
    return letters


def _is_letter(char: str) -> bool:
    return unicodedata.category(char)[0] in "LM" and not is_spaceless(char)
