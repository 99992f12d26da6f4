"""Words from tokens, entities from tags, and the aggregation of token scores for entities.

Shape legend: N tokens of the text, K labels.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import AggregationStrategy
from albert_serve.tokenizer import is_spaceless, word_bounds

OUTSIDE: Final = "O"
# This maps prefixes of BIO, IO, BIOES, BILOU and BMES to their equivalents in BIOES.
_PREFIXES: Final = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S"}
_BEGINS: Final = "BS"
_ENDS: Final = "ES"
# These words keep their full stop: U.S., Ph.D., and common parts of names.
_ABBREVIATION: Final = re.compile(
    r"(?:[^\W\d_]{1,2}\.){2,}|(?:Inc|Ltd|Co|Corp|Bros|Jr|Sr|St|Mt|Dr|Mr|Mrs|Ms|Prof)\."
)


class Span(NamedTuple):
    """A run of tags with one label: the label, and the indices of the first and last tag."""

    label: str
    first: int
    last: int


class Unit(NamedTuple):
    """A token, word or entity: its label, its score, and its range of characters."""

    label: str
    score: float
    start: int
    end: int


def split_tag(tag: str) -> tuple[str, str]:
    """Return the BIOES prefix of a tag (default: I) and its label."""
    prefix, dash, label = tag.partition("-")
    return (_PREFIXES[prefix], label) if dash and prefix in _PREFIXES else ("I", tag)


def find_spans(tags: Sequence[str]) -> Iterator[Span]:
    """Yield the runs of BIO, IO, BIOES, BILOU or BMES tags with one label, including "O".

    As in seqeval and `transformers`' pipeline, a tag begins a new run if its prefix says so, if the
    previous tag ends its run, or if the label changes. The pipeline reads only B and I.
    """
    first, previous_prefix, previous_label = 0, "", ""
    for number, tag in enumerate(tags):
        prefix, label = split_tag(tag)
        if number and (prefix in _BEGINS or previous_prefix in _ENDS or label != previous_label):
            yield Span(previous_label, first, number - 1)
            first = number
        previous_prefix, previous_label = prefix, label
    if tags:
        yield Span(previous_label, first, len(tags) - 1)


def find_words(text: str, offsets: Sequence[tuple[int, int]]) -> list[range]:
    """Return the tokens of each word.

    White space separates words. Punctuation at the ends of a word is not part of it, except the
    full stop of an abbreviation. In scripts without spaces, a token is a word. A token with the
    same start as the previous token belongs to the previous token's word.
    """
    firsts = _word_starts(text)
    begins = [
        number
        for number, (start, _) in enumerate(offsets)
        if number == 0 or firsts[start] == start != offsets[number - 1][0]
    ]
    return [range(*bounds) for bounds in pairwise([*begins, len(offsets)])]


def _word_starts(text: str) -> list[int]:
    """Return the start of each character's word, or the character's index outside words."""
    starts, _ = word_bounds(text)
    for chunk in re.finditer(r"\S+", text):
        positions = [n for n in range(*chunk.span()) if unicodedata.category(text[n])[0] in "LMN"]
        if not positions:
            continue
        first, end = positions[0], positions[-1] + 1
        end += bool(_ABBREVIATION.fullmatch(text, first, end + 1))
        for position in range(first + 1, end):
            if not (is_spaceless(text[position - 1]) or is_spaceless(text[position])):
                starts[position] = starts[position - 1]
    return starts


def aggregate(
    scores_NK: NDArray[np.float64],
    labels: Sequence[str],
    offsets: Sequence[tuple[int, int]],
    words: Sequence[range],
    strategy: AggregationStrategy,
) -> list[Unit]:
    """Return a unit for each word or, with the strategies "none" and "simple", for each token.

    A word has the label of its first token ("first"), the label with the best mean score
    ("average"), or the label of the token with the highest score ("max").
    """
    if strategy in ("none", "simple"):
        words = [range(number, number + 1) for number in range(len(offsets))]
    units = []
    for word in words:
        scores_K = _score(scores_NK[word.start : word.stop], strategy)
        best = int(scores_K.argmax())
        start, end = offsets[word[0]][0], offsets[word[-1]][1]
        units.append(Unit(labels[best], float(scores_K[best]), start, end))
    return units


def _score(scores_TK: NDArray[np.float64], strategy: AggregationStrategy) -> NDArray[np.float64]:
    if strategy == "average":
        mean_K: NDArray[np.float64] = scores_TK.mean(axis=0)
        return mean_K
    best: NDArray[np.float64] = scores_TK[scores_TK.max(axis=1).argmax()]
    return best if strategy == "max" else scores_TK[0]


def join(units: Sequence[Unit]) -> Iterator[Unit]:
    """Yield the entities that words or tokens form, with their mean scores."""
    for span in find_spans([unit.label for unit in units]):
        parts = units[span.first : span.last + 1]
        score = float(np.mean([unit.score for unit in parts]))
        yield Unit(span.label, score, parts[0].start, parts[-1].end)
