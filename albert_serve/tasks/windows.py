"""Overlapping windows over a text of any length, and their logits merged to one document.

Each token's logits come from the window in which its shorter side of context is longest, as in the
original BERT and ALBERT code ("max context"). So no token counts twice, and the probabilities over
the whole document sum to one.

Shape legend: N tokens of the text, S positions of one window's sequence, K outputs of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from albert_serve.tasks.base import Logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """The windows of a document.

    Attributes:
        ranges: text tokens of each window, end excluded.
        num_before: rows of logits in front of the text's in each sequence.
    """

    ranges: Sequence[tuple[int, int]]
    num_before: int

    @property
    def num_tokens(self) -> int:
        """N, the tokens of the text."""
        return self.ranges[-1][1]

    def owners(self) -> NDArray[np.int64]:
        """Return the window of each token's logits; (N,)."""
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
        """Return the logits of the N text tokens; (N, K).

        Args:
            logits: (S, K) for each window, in order.
        """
        owners = self.owners()
        document = np.empty((self.num_tokens, logits[0].shape[1]), dtype=np.float32)
        for number, ((start, end), window) in enumerate(zip(self.ranges, logits, strict=True)):
            owned = np.flatnonzero(owners[start:end] == number)
            document[start + owned] = window[self.num_before + owned]
        return document


def lay_windows(num_tokens: int, room: int, overlap: int, num_before: int) -> Windows:
    """Return windows of at most `room` of the `num_tokens` (N >= 1), overlapping by `overlap`.

    `overlap` must be below `room`.
    """
    starts = range(0, max(1, num_tokens - overlap), room - overlap)
    ranges = [(start, min(start + room, num_tokens)) for start in starts]
    return Windows(ranges=ranges, num_before=num_before)
