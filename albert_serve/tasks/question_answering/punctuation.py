"""Punctuation around an answer, which is left out: `2012,` is 2012."""

from __future__ import annotations

import re
from typing import Final

# Abbreviations keep their full stop: U.S., Ph.D., and those that often end an answer.
_ABBREVIATION: Final = re.compile(
    r"(?:^|(?<=\W))(?:[^\W\d_]{1,2}(?:\.[^\W\d_]{1,2})+|"
    r"Inc|Ltd|Co|Corp|Bros|Jr|Sr|St|Mt|Dr|Mr|Mrs|Ms|Prof|al|etc|vs)\.\Z"
)
# These marks end clauses, of Chinese, Japanese, Arabic and Hindi too; the full stop is not one.
_CLAUSE_ENDS: Final = ",;:，；：、。،؛۔।"
_QUOTES: Final = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "„": "“"}


def trim(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a range of characters without the punctuation around its text.

    A comma, full stop, colon or semicolon at its end is left out, but for an abbreviation's full
    stop; so are quotes around all of it, and a double quote at one end whose other is not inside.
    A range of nothing else stays as it is.
    """
    first, last = start, end
    while first < last:
        if text[last - 1].isspace() or _ends_clause(text, first, last):
            last -= 1
        elif text[first].isspace() or _is_dangling(text[first], text[first + 1 : last]):
            first += 1
        elif _is_dangling(text[last - 1], text[first : last - 1]):
            last -= 1
        elif _is_quoted(text[first:last]):
            first, last = first + 1, last - 1
        else:
            return first, last
    return start, end


def _ends_clause(text: str, first: int, last: int) -> bool:
    mark = text[last - 1]
    return mark in _CLAUSE_ENDS or (mark == "." and not _ABBREVIATION.search(text, first, last))


def _is_dangling(mark: str, others: str) -> bool:
    return mark in '"“”' and others.find("“" if mark == "”" else _QUOTES[mark]) < 0


def _is_quoted(answer: str) -> bool:
    opening, inner, closing = answer[0], answer[1:-1], answer[-1]
    is_pair = len(answer) > 1 and _QUOTES.get(opening) == closing
    return is_pair and opening not in inner and closing not in inner
