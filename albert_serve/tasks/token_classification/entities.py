"""Words of tokens, entities of tags, and the aggregation of tokens' scores to entities.

Shape legend: N tokens of the text, K labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import AggregationStrategy
from albert_serve.scripts import word_bounds

OUTSIDE: Final = "O"
_BEGINS: Final = "BS"
_ENDS: Final = "ES"


class Span(NamedTuple):
    """An entity in a sequence of tags: its label, its first tag and its last."""

    label: str
    first: int
    last: int


class Unit(NamedTuple):
    """A token, or a word, with its label."""

    label: str
    score: float
    start: int
    end: int


def split_tag(tag: str) -> tuple[str, str]:
    """Return the prefix of a tag (B, I, E or S) and the label; "I" of a tag without a prefix."""
    prefix, dash, label = tag.partition("-")
    return (prefix, label) if dash and prefix in ("B", "I", "E", "S") else ("I", tag)


def find_spans(tags: Sequence[str]) -> Iterator[Span]:
    """Yield the runs of tags of one label, "O" included, in BIO, BIOES or IO.

    As seqeval and the pipeline of `transformers` have them: a tag begins a new run if it says so,
    if the one before ends its run, or if its label is another. The pipeline reads only B and I.
    """
    first, prefix_before, label_before = 0, "", ""
    for number, tag in enumerate(tags):
        prefix, label = split_tag(tag)
        if number and (prefix in _BEGINS or prefix_before in _ENDS or label != label_before):
            yield Span(label_before, first, number - 1)
            first = number
        prefix_before, label_before = prefix, label
    if tags:
        yield Span(label_before, first, len(tags) - 1)


def find_words(text: str, offsets: Sequence[tuple[int, int]]) -> list[range]:
    """Return the tokens of each word.

    A token begins a word unless it begins within a run of letters, marks and digits, or where the
    token before does; so punctuation is no part of a word. In scripts without spaces a token is a
    word.
    """
    firsts, _ = word_bounds(text)
    begins = [
        number
        for number, (start, _) in enumerate(offsets)
        if number == 0 or firsts[start] == start != offsets[number - 1][0]
    ]
    return [range(*bounds) for bounds in pairwise([*begins, len(offsets)])]


def aggregate(
    scores_NK: NDArray[np.float64],
    labels: Sequence[str],
    offsets: Sequence[tuple[int, int]],
    words: Sequence[range],
    strategy: AggregationStrategy,
) -> list[Unit]:
    """Return the label and its score of each word; with "none" and "simple" of each token.

    A word has the label of its first token, of its tokens' mean scores, or of the token with the
    highest score.
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
    """Yield the entities of words or tokens, with their mean scores."""
    for span in find_spans([unit.label for unit in units]):
        parts = units[span.first : span.last + 1]
        score = float(np.mean([unit.score for unit in parts]))
        yield Unit(span.label, score, parts[0].start, parts[-1].end)
