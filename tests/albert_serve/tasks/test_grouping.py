"""Batches hold every index once, within their limits."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from albert_serve.tasks.grouping import cut_batches, group_by_length


@given(
    lengths=st.lists(st.integers(1, 512), max_size=60),
    max_tokens=st.sampled_from([1, 600, 4096]),
    max_padding=st.sampled_from([0, 16, math.inf]),
    ascends=st.booleans(),
)
def test_batches_hold_every_index_once_within_the_limits(
    lengths: list[int], max_tokens: int, max_padding: float, ascends: bool
) -> None:
    order = sorted(range(len(lengths)), key=lambda index: lengths[index] * (1 if ascends else -1))
    batches = cut_batches(order, lengths, max_tokens, max_padding_tokens=max_padding)
    assert [index for batch in batches for index in batch] == order
    for batch in batches:
        members = [lengths[index] for index in batch]
        padded = len(members) * max(members)
        assert padded <= max_tokens or len(members) == 1
        assert padded - sum(members) <= max_padding
    if not ascends:
        grouped = group_by_length(lengths, max_tokens, max_padding_tokens=max_padding)
        assert grouped == batches


def test_batches_are_cut_by_their_longest() -> None:
    lengths = [1, 2, 3, 4, 50]
    assert cut_batches(range(5), lengths, 8) == [[0, 1], [2, 3], [4]]
    assert group_by_length(lengths, 8) == [[4], [3, 2], [1, 0]]
    assert group_by_length([], 8) == []
