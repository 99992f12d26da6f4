"""A context of any length as overlapping windows, and their logits as those of one document.

Every token of the document is read once: from the window in which it has the most context on its
poorer side, as the original BERT and ALBERT code chooses ("max context"). So no token counts
twice, and the probabilities over the whole document sum to one.

Shape legend: N tokens of the context, S positions of one window's sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from albert_serve.tasks.base import Logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Where the windows lie.

    Attributes:
        ranges: context tokens of each window, end excluded.
        num_before: tokens in front of the context in each sequence: [CLS] question [SEP].
    """

    ranges: Sequence[tuple[int, int]]
    num_before: int

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.ranges[-1][1]

    def owners(self) -> NDArray[np.int64]:
        """For each context token the window that it is read from; (N,)."""
        best = np.full(self.num_tokens, -1)
        owners = np.zeros(self.num_tokens, dtype=np.int64)
        for number, (start, end) in enumerate(self.ranges):
            within = np.arange(end - start)
            context = np.minimum(within, within[::-1])
            better = context > best[start:end]
            best[start:end][better] = context[better]
            owners[start:end][better] = number
        return owners

    def stitch(self, logits: Sequence[Logits]) -> Logits:
        """The logits of "no answer" and of the N context tokens; (1 + N, 2).

        "No answer" is read at [CLS], from the window that believes in it least: an answer in one
        window is an answer in the document.

        Args:
            logits: (S, 2) for each window, in order.
        """
        owners = self.owners()
        document = np.empty((1 + self.num_tokens, 2), dtype=np.float32)
        document[0] = min((window[0] for window in logits), key=lambda null: float(null.sum()))
        for number, ((start, end), window) in enumerate(zip(self.ranges, logits, strict=True)):
            owned = np.flatnonzero(owners[start:end] == number)
            document[1 + start + owned] = window[self.num_before + owned]
        return document


def num_windows(num_tokens: int, room: int, overlap: int) -> int:
    """How many `lay_windows` would lay."""
    return len(_starts(num_tokens, room, overlap))


def lay_windows(num_tokens: int, room: int, overlap: int, num_before: int) -> Windows:
    """Windows of at most `room` tokens, neighbours sharing `overlap`, over `num_tokens` (N >= 1).

    `overlap` must be below `room`.
    """
    starts = _starts(num_tokens, room, overlap)
    ranges = [(start, min(start + room, num_tokens)) for start in starts]
    return Windows(ranges=ranges, num_before=num_before)


def _starts(num_tokens: int, room: int, overlap: int) -> range:
    return range(0, max(1, num_tokens - overlap), room - overlap)
