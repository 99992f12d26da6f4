"""Each piece of two tokenizers belongs to one span, whose characters are the same in both."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from albert_serve.tokenizer import SPECIAL_TOKENS, AlbertTokenizer
from tests.training.distillation.teachers import articles, letters_by_span
from training.distillation.alignment import (
    AlignedSequence,
    Aligner,
    align,
)
from training.distillation.teacher import PieceRange, Teacher

UNK, CLS, SEP = (SPECIAL_TOKENS.index(name) for name in ("<unk>", "[CLS]", "[SEP]"))
NAMES = ("WordPiece", "byte-level BPE", "unigram")
# Letters and signs that the vocabularies have, have as several bytes or pieces, or lack.
LETTERS = "aeinorstTHE019.,'-()\"é½–£€中\u0301\u200d\ufe0fß🙂[]#▁_"


def cuts_of(word: str) -> st.SearchStrategy[list[int]]:
    """Bounds that cut a word, its begin and end included."""
    within = st.sets(st.integers(1, max(1, len(word) - 1)), max_size=len(word))
    return within.map(lambda cuts: sorted({0, len(word)} | {c for c in cuts if c < len(word)}))


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[list[str], list[PieceRange]]:
    """A word in the student's pieces, perhaps after a lone "▁", and in the teacher's."""
    word = draw(st.text("abcde", min_size=1, max_size=12))
    surfaces = [word[begin:end] for begin, end in pairwise(draw(cuts_of(word)))]
    pieces = [
        PieceRange(10 + begin, begin, end)
        for begin, end in pairwise(draw(cuts_of(word)))
        # Several bytes, or several pieces, of one and the same character.
        for _ in range(draw(st.integers(1, 3)) if end == begin + 1 else 1)
    ]
    return [""] * draw(st.integers(0, 1)) + surfaces, pieces


@given(two_cuts())
def test_spans_are_the_shortest_with_the_same_characters_in_both(
    cut: tuple[list[str], list[PieceRange]],
) -> None:
    surfaces, pieces = cut
    word = align(surfaces, pieces)
    bounds = list(accumulate(map(len, surfaces), initial=0))
    for span in range(word.num_spans):
        ours = [
            pair
            for pair, own in zip(pairwise(bounds), word.student_spans, strict=True)
            if own == span
        ]
        theirs = [
            piece for piece, own in zip(pieces, word.teacher_spans, strict=True) if own == span
        ]
        assert (ours[0][0], ours[-1][1]) == (theirs[0].begin, theirs[-1].end)
    assert word.teacher_ids == tuple(piece.token_id for piece in pieces)
    both = set(accumulate(map(len, surfaces))) & {piece.end for piece in pieces}
    assert word.num_spans == len(both)


def aligned(tokenizer: AlbertTokenizer, teacher: Teacher, text: str) -> AlignedSequence:
    ids = np.array(tokenizer.encode(text).ids)
    return Aligner(tokenizer, teacher.tokenizer).sequence(ids, len(ids))


def assert_aligned(sequence: AlignedSequence, num_tokens: int) -> None:
    """Each token of either is in one span, and the student's spans have no gaps."""
    assert len(sequence.student_spans) == num_tokens
    assert sequence.student_spans[0] == 0
    assert set(np.diff(sequence.student_spans)) <= {0, 1}
    assert len(sequence.teacher_ids) == len(sequence.teacher_spans) == len(sequence.teacher_types)
    assert (np.diff(sequence.teacher_spans) >= 0).all()
    assert set(sequence.teacher_spans) <= set(sequence.student_spans)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(text=st.text(LETTERS + "  ", max_size=30))
@example(text="'\ufe0f'")  # to the student two apostrophes, which a unigram teacher makes one mark
def test_any_text_is_aligned(
    name: str, text: str, tokenizer: AlbertTokenizer, teachers: dict[str, Teacher]
) -> None:
    ids = tokenizer.encode(text).ids
    sequence = aligned(tokenizer, teachers[name], text)
    assert_aligned(sequence, len(ids))
    for ours, theirs in letters_by_span(sequence, ids, tokenizer, teachers[name]):
        assert theirs is None or theirs.replace('"', "'") in (ours.replace('"', "'"), "")


@pytest.mark.parametrize("name", NAMES)
def test_articles_have_the_same_letters_in_each_span(
    name: str, tokenizer: AlbertTokenizer, teachers: dict[str, Teacher]
) -> None:
    teacher = teachers[name]
    aligner = Aligner(tokenizer, teacher.tokenizer)
    num_same = num_spans = 0
    for text in articles():
        ids = tokenizer.encode(text).ids
        sequence = aligner.sequence(np.array(ids), len(ids))
        assert_aligned(sequence, len(ids))
        spans = letters_by_span(sequence, ids, tokenizer, teacher)
        assert all(theirs in (ours, None) for ours, theirs in spans)
        num_same += sum(ours == theirs for ours, theirs in spans)
        num_spans += len(spans)
    assert num_same > 0.98 * num_spans
    assert num_spans > 30_000


@pytest.mark.parametrize("name", NAMES)
def test_special_and_unknown_tokens_are_spans_of_their_own(
    name: str, tokenizer: AlbertTokenizer, teachers: dict[str, Teacher]
) -> None:
    known = teachers[name].tokenizer
    word = tokenizer.encode("the").ids[1]
    ids = np.array([CLS, word, UNK, word, SEP, word, SEP])
    sequence = Aligner(tokenizer, known).sequence(ids, 5)
    the = [piece.token_id for piece in known.encode_word("the")]
    expected = [known.cls_id, *the, known.unk_id, *the, known.sep_id, *the, known.sep_id]
    assert sequence.teacher_ids.tolist() == expected
    assert sequence.student_spans.tolist() == list(range(7))
    first = len(expected) - len(the) - 1
    assert sequence.teacher_types.tolist() == [0] * first + [1] * (len(the) + 1)
