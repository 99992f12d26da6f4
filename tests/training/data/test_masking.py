"""Masks are spans of complete words, distributed as in the paper, at a specified rate."""

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
# Pieces with odd ids start a word.
STARTS: NDArray[np.bool_] = np.arange(VOCAB_SIZE) % 2 == 1
Ids = NDArray[np.int64]
sequences = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60).map(
    lambda ids: np.array([2, *ids, 3], np.int64)
)


def spans(chosen: Ids, begins: Ids, ends: Ids) -> list[int]:
    """Return the number of words in each sequence of adjacent masked words."""
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
def test_masks_cover_complete_words_within_the_rate(ids: Ids, seed: int, rate: float) -> None:
    masking = NgramMasking(word_starts=STARTS, rate=rate)
    original_ids = ids.copy()
    masked, chosen = masking(ids, np.random.default_rng(seed))
    assert np.array_equal(ids, original_ids)
    assert masked.shape == ids.shape
    assert (np.diff(chosen) > 0).all()
    assert len(chosen) <= max(1, round(rate * len(ids)))
    assert (ids[chosen] >= NUM_SPECIAL).all()
    is_chosen = np.isin(np.arange(len(ids)), chosen)
    assert np.array_equal(masked[~is_chosen], ids[~is_chosen])
    assert ((masked[chosen] == 4) | (masked[chosen] >= NUM_SPECIAL)).all()
    begins, ends = word_bounds(ids, STARTS, IS_SPECIAL)
    for begin, end in zip(begins, ends, strict=True):
        assert is_chosen[begin:end].all() or not is_chosen[begin:end].any()


def test_words_start_at_starting_pieces_and_after_special_tokens() -> None:
    # [CLS], a word, a word, [SEP], the rest of a truncated word, a word, [SEP]
    ids = np.array([2, 11, 10, 12, 13, 3, 14, 16, 15, 3], np.int64)
    begins, ends = word_bounds(ids, STARTS, IS_SPECIAL)
    assert (begins.tolist(), ends.tolist()) == ([1, 4, 6, 8], [4, 5, 8, 9])


def original_masks(ids: Ids, rate: float, rng: np.random.Generator) -> Ids:
    """Mask as create_masked_lm_predictions of create_pretraining_data.py, without an inner [SEP].

    A span over the budget is shortened, down to one word. A span that overlaps another is skipped.
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
def test_masks_are_distributed_as_in_the_original_code(rate: float) -> None:
    """The lengths of masked spans and their positions have the same distributions.

    At a rate of 0.5, many spans overlap.
    """
    masking = NgramMasking(word_starts=STARTS, rate=rate)
    rng = np.random.default_rng(0)
    is_start = rng.random((1500, 70)) < 0.7
    texts = [np.array([2, *np.where(line, 11, 10).tolist(), 3], np.int64) for line in is_start]
    our_masks = [masking(ids, rng)[1] for ids in texts]
    expected_masks = [original_masks(ids, rate, rng) for ids in texts]

    def count_lengths(masks: list[Ids]) -> Ids:
        lengths = [
            spans(chosen, *word_bounds(ids, STARTS, IS_SPECIAL))
            for ids, chosen in zip(texts, masks, strict=True)
        ]
        return np.bincount(np.minimum(list(chain(*lengths)), 5), minlength=6)[1:]

    def count_positions(masks: list[Ids]) -> Ids:
        return np.bincount(np.concatenate(masks) // 10, minlength=8)

    # p = 0.001 at four and at seven degrees of freedom
    for count, limit in ((count_lengths, 18.5), (count_positions, 24.3)):
        assert homogeneity(count(our_masks), count(expected_masks)) < limit


def homogeneity(*counts: Ids) -> float:
    """Return the chi-square statistic of two counts from one distribution."""
    expected = [sum(counts) * count.sum() / np.sum(counts) for count in counts]
    return float(sum(((o - e) ** 2 / e).sum() for o, e in zip(counts, expected, strict=True)))


def test_80_percent_of_chosen_tokens_are_masked_10_random_10_unchanged() -> None:
    ids = np.array([2, *[11] * 120, 3], np.int64)
    masking, rng = NgramMasking(word_starts=STARTS), np.random.default_rng(0)
    results = [masking(ids, rng) for _ in range(500)]
    chosen_ids = np.concatenate([masked[chosen] for masked, chosen in results])
    random_ids = chosen_ids[(chosen_ids != 4) & (chosen_ids != 11)]
    counts = np.array([(chosen_ids == 4).sum(), len(random_ids), (chosen_ids == 11).sum()])
    expected = np.array([0.8, 0.1 * 94 / 95, 0.1 + 0.1 / 95]) * len(chosen_ids)
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # p = 0.001, 2 degrees of freedom
    random_counts = np.bincount(random_ids, minlength=VOCAB_SIZE)
    assert random_counts[:NUM_SPECIAL].sum() == 0
    assert np.delete(random_counts[NUM_SPECIAL:], 6).min() > 0


def test_special_tokens_can_have_any_ids() -> None:
    special = SpecialIds(cls=90, sep=91, mask=92, all_ids=frozenset({0, 89, 90, 91, 92}))
    masking = NgramMasking(word_starts=STARTS, special=special, rate=0.5)
    ids = np.array([90, *range(1, 60), 91], np.int64)
    results = [masking(ids, np.random.default_rng(seed)) for seed in range(20)]
    chosen_ids = np.concatenate([masked[chosen] for masked, chosen in results])
    assert not np.isin(chosen_ids, [0, 89, 90, 91]).any()
    assert (chosen_ids == 92).mean() > 0.7
    assert all(1 <= chosen[0] <= chosen[-1] < len(ids) - 1 for _, chosen in results)


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
def test_the_original_rule_finds_word_starts(piece: str, others: list[str], starts: bool) -> None:
    """_is_start_piece_sp of create_pretraining_data.py: a piece of several marks starts no word.

    In addition, letters of languages that write spaces continue a word.
    """
    pieces = [*SPECIAL_TOKENS, piece, *others]
    model = (
        WordPiece({name: index for index, name in enumerate(pieces)}, unk_token="<unk>")
        if "##ing" in pieces
        else Unigram([(name, -1.0) for name in pieces], 1, False)
    )
    vocabulary = Tokenizer(model)
    vocabulary.add_special_tokens(list(SPECIAL_TOKENS))
    assert word_starts(AlbertTokenizer(vocabulary))[pieces.index(piece)] == starts
