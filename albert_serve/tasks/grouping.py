"""Grouping of sequences by length into batches with little padding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray


def group_by_length(
    lengths: Sequence[int], max_tokens: int, *, max_padding_tokens: float = math.inf
) -> list[list[int]]:
    """Return indices in batches of like lengths, longest first; see `cut_batches`."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return cut_batches(order, lengths, max_tokens, max_padding_tokens=max_padding_tokens)


def cut_batches(
    order: Iterable[int],
    lengths: Sequence[int] | NDArray[Any],
    max_tokens: int,
    *,
    max_padding_tokens: float = math.inf,
) -> list[list[int]]:
    """Cut indices, ordered by length, into batches; each index is in one batch.

    Args:
        order: indices in ascending or descending order of their lengths.
        lengths: tokens by index.
        max_tokens: the limit of a batch's tokens, padding included; a longer sequence is alone.
        max_padding_tokens: the limit of a batch's padding tokens.
    """
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = num_tokens = 0
    for index in order:
        length = int(lengths[index])
        longest, num_tokens = max(longest, length), num_tokens + length
        padded = (len(batch) + 1) * longest
        if batch and (padded > max_tokens or padded - num_tokens > max_padding_tokens):
            batches.append(batch)
            batch, longest, num_tokens = [], length, length
        batch.append(index)
    return [*batches, batch] if batch else batches
