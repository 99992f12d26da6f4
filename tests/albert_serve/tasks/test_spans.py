"""The best spans of a context are those of an exhaustive search, in little memory."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from albert_serve.tasks.question_answering import spans
from albert_serve.tasks.question_answering.spans import NUM_BEST, find_spans


def search(
    logits: NDArray[np.float32],
    offsets: list[tuple[int, int]],
    max_answer_len: int,
) -> list[tuple[int, int, float]]:
    """Return all ranges of characters with the logarithm of their summed weights, best first."""
    weights: dict[tuple[int, int], float] = defaultdict(float)
    for first, (start, first_end) in enumerate(offsets):
        for last in range(first, min(first + max_answer_len, len(offsets))):
            last_start, end = offsets[last]
            if first_end > start and end > last_start and end > start:
                total = float(logits[1 + first, 0]) + float(logits[1 + last, 1])
                weights[start, end] += np.exp(total)
    ordered = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
    return [(*span, float(np.log(weight))) for span, weight in ordered]


@given(
    lengths=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    max_answer_len=st.integers(1, 8),
    max_candidates=st.sampled_from([1, 5, 40, 1 << 20]),
    top_k=st.sampled_from([1, NUM_BEST, 60]),
    seed=st.integers(0, 1000),
)
def test_spans_are_those_of_an_exhaustive_search_in_blocks_of_any_size(
    lengths: list[int], max_answer_len: int, max_candidates: int, top_k: int, seed: int
) -> None:
    """Every third token covers the same characters as the token before it."""
    ends = list(accumulate(lengths))
    offsets = [(end - size, end) for size, end in zip(lengths, ends, strict=True)]
    offsets = [offsets[index - index % 3 % 2] for index in range(len(offsets))]
    logits = np.random.default_rng(seed).normal(size=(1 + len(offsets), 2)).astype(np.float32)
    expected = search(logits, offsets, max_answer_len)[: max(top_k, NUM_BEST)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "_MAX_CANDIDATES", max_candidates)
        found = find_spans(logits, offsets, max_answer_len=max_answer_len, top_k=top_k)
    assert [(span.start, span.end) for span in found.best] == [span[:2] for span in expected]
    assert [span.logit for span in found.best] == pytest.approx([span[2] for span in expected])
    assert found.no_answer == pytest.approx(float(logits[0].sum()))
