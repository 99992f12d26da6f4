"""Words of a text, in scripts with and without a space between them."""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Final

# The first word of their characters' names.
_SPACELESS: Final = frozenset(
    ("CJK", "HIRAGANA", "KATAKANA", "HALFWIDTH", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR",
     "TIBETAN")
)  # fmt: skip
_FIRST: Final = "\u0e00"  # of Thai


@cache
def is_spaceless(char: str) -> bool:
    """Whether a character is of a script that puts no space between words."""
    return char >= _FIRST and unicodedata.name(char, "").split(" ")[0] in _SPACELESS


def word_bounds(text: str) -> tuple[list[int], list[int]]:
    """Return the start and end of each character's word; outside words of the character itself.

    A word is a run of letters, marks and digits; in scripts without spaces between words it is a
    letter with its marks.
    """
    kinds = [unicodedata.category(character)[0] for character in text]
    is_alone = list(map(is_spaceless, text))
    goes_on = [
        kinds[i] in "LMN"
        and kinds[i - 1] in "LMN"
        and (kinds[i] == "M" or not (is_alone[i] or is_alone[i - 1]))
        for i in range(1, len(text))
    ]
    first = list(range(len(text)))
    last = list(range(1, len(text) + 1))
    for i, is_inside in enumerate(goes_on, start=1):
        if is_inside:
            first[i] = first[i - 1]
    for i in range(len(text) - 2, -1, -1):
        if goes_on[i]:
            last[i] = last[i + 1]
    return first, last
