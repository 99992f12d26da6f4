"""Alignment of two tokenizers by the characters of their pieces.

A word of the student's tokenizer extends from one piece that begins a word to the next. The
teacher's tokenizer encodes the same characters. A span is a shortest range of characters whose
bounds are bounds of pieces in both tokenizers: every piece belongs to one span, and two models are
compared by the means of their states over the pieces of a span.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from albert_serve.tokenizer import AlbertTokenizer
from training.distillation.teacher import HfTokenizer, PieceRange

# Size of the cache of aligned words; natural text repeats most of its words.
_MAX_WORDS: Final = 1 << 19


class _AlignedWord(NamedTuple):
    """One word in both tokenizers' pieces.

    Attributes:
        student_spans: the span of each of the student's pieces, ascending from 0.
        teacher_ids: the teacher's pieces; empty if its tokenizer drops the word.
        teacher_spans: the span of each of these pieces, ascending.
    """

    student_spans: tuple[int, ...]
    teacher_ids: tuple[int, ...]
    teacher_spans: tuple[int, ...]

    @property
    def num_spans(self) -> int:
        """Spans of the word."""
        return self.student_spans[-1] + 1


def align(surfaces: Sequence[str], pieces: Sequence[PieceRange]) -> _AlignedWord:
    """Align the student's pieces of one word, by their characters, with the teacher's.

    Args:
        surfaces: the characters of each of the student's pieces; "" for a lone "▁".
        pieces: the teacher's, in ascending order, their ranges in the joined surfaces.
    """
    bounds = [0]
    for surface in surfaces:
        bounds.append(bounds[-1] + len(surface))
    is_cut = [0 < offset < bounds[-1] for offset in range(bounds[-1] + 1)]
    for piece in pieces:
        for offset in range(piece.begin + 1, min(piece.end, bounds[-1])):
            is_cut[offset] = False
    cuts = [offset for offset in sorted(set(bounds)) if is_cut[offset]]
    return _AlignedWord(
        student_spans=tuple(bisect_right(cuts, begin) for begin, _ in pairwise(bounds)),
        teacher_ids=tuple(piece.token_id for piece in pieces),
        teacher_spans=tuple(bisect_right(cuts, piece.begin) for piece in pieces),
    )


class AlignedSequence(NamedTuple):
    """One sequence in the teacher's tokens, with the spans of both tokenizers.

    Attributes:
        teacher_ids: (N,) the teacher's tokens, with special tokens.
        teacher_types: (N,) 0 up to the first [SEP], 1 after it.
        student_spans: (S,) the span of each of the student's tokens, ascending from 0.
        teacher_spans: (N,) the span of each of the teacher's tokens.
    """

    teacher_ids: NDArray[np.int64]
    teacher_types: NDArray[np.int64]
    student_spans: NDArray[np.int64]
    teacher_spans: NDArray[np.int64]


class Aligner:
    """Aligns whole sequences; aligned words are cached."""

    def __init__(self, student: AlbertTokenizer, teacher: HfTokenizer) -> None:
        self._pieces = [student.token(index) for index in range(student.vocab_size)]
        self._surfaces = [student.surface(piece) for piece in self._pieces]
        self._starts_word = np.array([student.begins_word(piece) for piece in self._pieces])
        self._is_special = np.isin(np.arange(student.vocab_size), list(student.special.every))
        self._starts_word |= self._is_special
        self._special = {
            student.cls_id: teacher.cls_id,
            student.sep_id: teacher.sep_id,
            student.unk_id: teacher.unk_id,
        }
        self._teacher = teacher
        self._aligned = lru_cache(maxsize=_MAX_WORDS)(self._align)

    def _align(self, ids: tuple[int, ...]) -> _AlignedWord:
        """Align one word in the student's pieces; a special token counts as a word."""
        if ids[0] in self._special:
            return _AlignedWord((0,), (self._special[ids[0]],), (0,))
        surfaces = [self._surfaces[index] for index in ids]
        return align(surfaces, self._teacher.encode_word("".join(surfaces)))

    def sequence(self, ids: NDArray[np.int64], second: int) -> AlignedSequence:
        """Align [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

        Args:
            ids: (S,) the student's tokens, unmasked.
            second: position of the first token of B; S without B.
        """
        teacher_ids: list[int] = []
        teacher_spans: list[int] = []
        student_spans: list[int] = []
        num_spans = num_first = 0
        for begin, end in self._word_ranges(ids):
            word = self._aligned(tuple(ids[begin:end].tolist()))
            if begin < second:
                num_first += len(word.teacher_ids)
            teacher_ids += word.teacher_ids
            teacher_spans += [num_spans + span for span in word.teacher_spans]
            student_spans += [num_spans + span for span in word.student_spans]
            num_spans += word.num_spans
        types = np.ones(len(teacher_ids), np.int64)
        types[:num_first] = 0
        return AlignedSequence(
            np.array(teacher_ids), types, np.array(student_spans), np.array(teacher_spans)
        )

    def _word_ranges(self, ids: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        begins_word = self._starts_word[ids]
        begins_word[1:] |= self._is_special[ids[:-1]]
        begins = np.flatnonzero(begins_word).tolist()
        return pairwise([*begins, len(ids)])


class SpanMeans(NamedTuple):
    """Assignment of rows to spans, with weights by which sums become means.

    Attributes:
        rows: (R,) rows of hidden states.
        spans: (R,) the span of each row.
        weights: (R,) 1 / rows of that span.
    """

    rows: NDArray[np.int64]
    spans: NDArray[np.int64]
    weights: NDArray[np.float32]


def span_means(
    student_spans: NDArray[np.int64], teacher_spans: NDArray[np.int64], max_teacher: int
) -> tuple[SpanMeans, SpanMeans]:
    """Return the means over the student's and the teacher's rows of each span that both have.

    The index of a span is that of its first student token.

    Args:
        max_teacher: number of the teacher's positions; a span that exceeds them is dropped.
    """
    num_spans = int(student_spans[-1]) + 1
    in_student = np.bincount(student_spans, minlength=num_spans)
    in_teacher = np.bincount(teacher_spans, minlength=num_spans)
    in_teacher[teacher_spans[max_teacher:]] = 0
    firsts = np.searchsorted(student_spans, np.arange(num_spans))
    return (
        _means(student_spans, in_student * (in_teacher > 0), firsts),
        _means(teacher_spans, in_teacher, firsts),
    )


def _means(
    spans: NDArray[np.int64], sizes: NDArray[np.int64], names: NDArray[np.int64]
) -> SpanMeans:
    rows = np.flatnonzero(sizes[spans])
    row_spans = spans[rows]
    weights = (1 / sizes[row_spans]).astype(np.float32)
    return SpanMeans(rows, names[row_spans], weights)
