"""Scripts that put no space between words."""

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
