"""Normalisation of text before SentencePiece, like in ALBERT's original code and `transformers`.

`preprocess_text` of google-research/albert decomposes a text, removes characters with a non-zero
`unicodedata.combining` (accents, but not vowel signs), and lower-cases it.
"""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tokenizers import Regex, normalizers

# Python's split() treats these characters as white space, but `tokenizers` does not.
_SPACES: Final = r"[\x0b\x1c-\x1f\x85]"
# Python's lower() converts a sigma at the end of a word to ς, but `tokenizers` does not. A word
# may contain marks, apostrophes and similar characters.
_CASED: Final = r"[\p{Lu}\p{Ll}\p{Lt}]"
_INNER: Final = r"[\p{Mn}\p{Me}\p{Cf}\p{Lm}\p{Sk}.:'‘’·\u0387\u2024\u2027]"
_WORD: Final = "|".join(_CASED + _INNER * number for number in range(3))
_FINAL_SIGMA: Final = rf"(?<={_WORD})Σ(?!{_INNER}*{_CASED})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Folding:
    """The differences between texts that a vocabulary ignores.

    Attributes:
        case: whether text is lower-cased.
        accents: whether combining characters are removed, after compatibility decomposition.
    """

    case: bool = True
    accents: bool = True

    @classmethod
    def of_pieces(cls, pieces: Iterable[str]) -> Folding:
        """Return the folding that a vocabulary's pieces imply.

        Case is folded if no piece has capitals, and accents if no piece has accents.
        """
        letters = "".join(pieces)
        return cls(
            case=letters == letters.lower(),
            accents=not any(map(unicodedata.combining, unicodedata.normalize("NFKD", letters))),
        )

    def group(self, words: Iterable[str]) -> list[list[str]]:
        """Return the groups of two or more words that folding makes equal."""
        normalizer = self.normalizer()
        groups = defaultdict[str, list[str]](list)
        for word in words:
            groups[normalizer.normalize_str(word)].append(word)
        return [group for group in groups.values() if len(group) > 1]

    def normalizer(self) -> normalizers.Normalizer:
        """Return the normalizer, which also replaces `` and '' by double quotes."""
        steps: list[normalizers.Normalizer] = [
            normalizers.Replace(Regex(_SPACES), " "),
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
        ]
        if self.accents:
            steps += [normalizers.NFKD(), normalizers.Replace(Regex(_combining()), "")]
        if self.case:
            steps += [normalizers.Replace(Regex(_FINAL_SIGMA), "ς"), normalizers.Lowercase()]
        return normalizers.Sequence(steps)


def _combining() -> str:
    """Return a regular expression of the characters that the original code removes."""
    codes = [code for code in range(sys.maxunicode + 1) if unicodedata.combining(chr(code))]
    begins = [codes[0], *(b for a, b in pairwise(codes) if b != a + 1)]
    ends = [*(a for a, b in pairwise(codes) if b != a + 1), codes[-1]]
    ranges = (f"{chr(begin)}-{chr(end)}" for begin, end in zip(begins, ends, strict=True))
    return f"[{''.join(ranges)}]"
