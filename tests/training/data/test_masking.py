"""Masks are spans of whole words, distributed as the paper says, at a given rate."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordPiece

from albert_serve.tokenizer import SPECIAL_TOKENS, AlbertTokenizer, SpecialIds
from training.data.masking import NgramMasking, word_bounds, word_starts

pytestmark = pytest.mark.process

VOCAB_SIZE = 100
NUM_SPECIAL = len(SPECIAL_TOKENS)
IS_SPECIAL: NDArray[np.bool_] = np.arange(VOCAB_SIZE) < NUM_SPECIAL
# Pieces of odd ids begin a word.
STARTS: NDArray[np.bool_] = np.arange(VOCAB_SIZE) % 2 == 1
Ids = NDArray[np.int64]
sequences = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60).map(
    lambda ids: np.array([2, *ids, 3], np.int64)
)


def spans(chosen: Ids, begins: Ids, ends: Ids) -> list[int]:
    """The number of words of each run of chosen positions."""
    masked = set(chosen.tolist())
    lengths: list[int] = []
    last_end = -1
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        if begin in masked:
            if begin == last_end:
                lengths[-1] += 1
            else:
                lengths.append(1)
            last_end = end
    return lengths


@settings(deadline=None, max_examples=200)
@given(sequences, st.integers(0, 1000), st.sampled_from([0.0, 0.15, 0.5, 1.0]))
def test_invariants_of_every_mask(ids: Ids, seed: int, rate: float) -> None:
    masking = NgramMasking(word_starts=STARTS, rate=rate)
    before = ids.copy()
    masked, chosen = masking(ids, np.random.default_rng(seed))
    assert np.array_equal(ids, before)
    assert masked.shape == ids.shape
    assert (np.diff(chosen) > 0).all()
    assert len(chosen) <= max(1, round(rate * len(ids)))
    assert (ids[chosen] >= NUM_SPECIAL).all()
    others = np.setdiff1d(np.arange(len(ids)), chosen)
    assert np.array_equal(masked[others], ids[others])
    assert ((masked[chosen] == 4) | (masked[chosen] >= NUM_SPECIAL)).all()
    is_chosen = np.isin(np.arange(len(ids)), chosen)
    begins, ends = word_bounds(ids, STARTS, IS_SPECIAL)
    for begin, end in zip(begins, ends, strict=True):
        assert is_chosen[begin:end].all() or not is_chosen[begin:end].any()


def test_bounds_of_words() -> None:
    #              CLS  word    word  SEP  rest of a word, word
    ids = np.array([2, 11, 10, 12, 13, 3, 14, 16, 15, 3], np.int64)
    begins, ends = word_bounds(ids, STARTS, IS_SPECIAL)
    assert list(zip(begins.tolist(), ends.tolist(), strict=True)) == [
        (1, 4),
        (4, 5),
        (6, 8),
        (8, 9),
    ]


def mask_as_the_original(ids: Ids, rate: float, rng: np.random.Generator) -> Ids:
    """create_masked_lm_predictions of create_pretraining_data.py, for ids without a [SEP] inside.

    A span over the budget is tried shorter, down to a word; one that meets another is left out.
    """
    begins, ends = word_bounds(ids, STARTS, IS_SPECIAL)
    words = [range(begin, end) for begin, end in zip(begins, ends, strict=True)]
    num_to_predict = max(1, round(rate * len(ids)))
    covered: set[int] = set()
    for first in rng.permutation(len(words)).tolist():
        num_words = int(rng.choice([1, 2, 3], p=[6 / 11, 3 / 11, 2 / 11]))
        spans = [list(chain(*words[first : first + n])) for n in range(num_words, 0, -1)]
        span = next((s for s in spans if len(covered) + len(s) <= num_to_predict), None)
        if span is not None and not covered.intersection(span):
            covered.update(span)
    return np.array(sorted(covered))


@pytest.mark.parametrize("rate", [0.15, 0.5])
def test_masks_are_distributed_as_the_original_s(rate: float) -> None:
    """By the lengths of what is masked in one piece, and by where it is.

    Of half the tokens many spans meet another.
    """
    masking = NgramMasking(word_starts=STARTS, rate=rate)
    rng = np.random.default_rng(0)
    is_start = rng.random((1500, 70)) < 0.7
    texts = [np.array([2, *np.where(line, 11, 10).tolist(), 3], np.int64) for line in is_start]
    ours = [masking(ids, rng)[1] for ids in texts]
    theirs = [mask_as_the_original(ids, rate, rng) for ids in texts]
    by_length = [
        np.bincount(
            [
                min(length, 5)
                for ids, chosen in zip(texts, each, strict=True)
                for length in spans(chosen, *word_bounds(ids, STARTS, IS_SPECIAL))
            ],
            minlength=6,
        )[1:]
        for each in (ours, theirs)
    ]
    assert homogeneity(*by_length) < 18.5  # p = 0.001 at four degrees of freedom
    by_place = [np.bincount(np.concatenate(each) // 10, minlength=8) for each in (ours, theirs)]
    assert homogeneity(*by_place) < 24.3  # p = 0.001 at seven degrees of freedom


def homogeneity(*counts: Ids) -> float:
    """Chi-square of two counts being of the same distribution."""
    expected = [sum(counts) * each.sum() / np.sum(counts) for each in counts]
    return sum(
        float(((actual - wanted) ** 2 / wanted).sum())
        for actual, wanted in zip(counts, expected, strict=True)
    )


def test_of_the_chosen_80_percent_are_masked_10_random_10_kept() -> None:
    ids = np.array([2, *[11] * 120, 3], np.int64)
    masking, rng = NgramMasking(word_starts=STARTS), np.random.default_rng(0)
    drawn = [masking(ids, rng) for _ in range(500)]
    fates = np.concatenate([masked[chosen] for masked, chosen in drawn])
    num_masked, num_kept = (fates == 4).sum(), (fates == 11).sum()
    num_random = len(fates) - num_masked - num_kept
    expected = np.array([0.8, 0.1 * 94 / 95, 0.1 + 0.1 / 95]) * len(fates)
    chi_square = ((np.array([num_masked, num_random, num_kept]) - expected) ** 2 / expected).sum()
    assert chi_square < 13.8  # p = 0.001 at two degrees of freedom
    random = fates[(fates != 4) & (fates != 11)]
    counts = np.bincount(random, minlength=VOCAB_SIZE)
    assert counts[:NUM_SPECIAL].sum() == 0
    assert np.delete(counts[NUM_SPECIAL:], 6).min() > 0


def test_special_tokens_can_have_any_ids() -> None:
    special = SpecialIds(cls=90, sep=91, mask=92, all_ids=frozenset({0, 89, 90, 91, 92}))
    masking = NgramMasking(word_starts=STARTS, special=special, rate=0.5)
    ids = np.array([90, *range(1, 60), 91], np.int64)
    drawn = [masking(ids, np.random.default_rng(seed)) for seed in range(20)]
    replaced = np.concatenate([masked[chosen] for masked, chosen in drawn])
    assert not np.isin(replaced, [0, 89, 90, 91]).any()
    assert (replaced == 92).mean() > 0.7
    assert all(1 <= chosen[0] <= chosen[-1] < len(ids) - 1 for _, chosen in drawn)


@pytest.mark.parametrize(
    ("piece", "others", "starts"),
    [
        *((piece, ["▁"], True) for piece in ("▁the", ".", "é", "a1", "の")),
        *((piece, ["▁"], False) for piece in ("ing", "--", "a-")),
        ("ü", ["▁", "für"], False),
        ("ी", ["▁", "मेरी"], False),
        ("天气", ["▁", "今天"], True),
        ("##ing", ["play"], False),
        ("play", ["##ing"], True),
    ],
)
def test_words_begin_by_the_original_s_rule(piece: str, others: list[str], starts: bool) -> None:
    """_is_start_piece_sp of create_pretraining_data.py: several marks in one piece begin none.

    Beside it, letters of a language with spaces continue its words.
    """
    is_wordpiece = any(each.startswith("##") for each in (piece, *others))
    pieces = dict.fromkeys((*SPECIAL_TOKENS, piece, *others, *(["##x"] if is_wordpiece else [])))
    model = (
        WordPiece({each: index for index, each in enumerate(pieces)}, unk_token="<unk>")
        if is_wordpiece
        else Unigram([(each, -1.0) for each in pieces], 1, False)
    )
    vocabulary = Tokenizer(model)
    vocabulary.add_special_tokens(list(SPECIAL_TOKENS))
    assert word_starts(AlbertTokenizer(vocabulary))[list(pieces).index(piece)] == starts
