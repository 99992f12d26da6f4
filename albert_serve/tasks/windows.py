"""Overlapping windows of a text of any length, whose logits are merged into one document.

Each token's logits come from the window that gives it the most context on its shorter side, as in
the original BERT and ALBERT code ("max context"). So no token counts twice, and the probabilities
over the document have a sum of 1.

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
        ranges: start and end (excluded) of each window, as indices of the text's tokens.
        num_before: number of rows of logits before the text's rows in each sequence.
    """

    ranges: Sequence[tuple[int, int]]
    num_before: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the text, N."""
        return self.ranges[-1][1]

    def window_per_token(self) -> NDArray[np.int64]:
        """Return, for each token, the index of the window that gives its logits (N,)."""
        max_context = np.full(self.num_tokens, -1)
        windows = np.zeros(self.num_tokens, dtype=np.int64)
        for index, (start, end) in enumerate(self.ranges):
            offsets = np.arange(end - start)
            context = np.minimum(offsets, offsets[::-1])
            is_longer = context > max_context[start:end]
            max_context[start:end][is_longer] = context[is_longer]
            windows[start:end][is_longer] = index
        return windows

    def stitch(self, logits: Sequence[Logits]) -> Logits:
        """Return the logits of the text's tokens (N, K).

        Args:
            logits: logits (S, K) of each window, in order.
        """
        windows = self.window_per_token()
        document = np.empty((self.num_tokens, logits[0].shape[1]), dtype=np.float32)
        for index, ((start, end), window) in enumerate(zip(self.ranges, logits, strict=True)):
            offsets = np.flatnonzero(windows[start:end] == index)
            document[start + offsets] = window[self.num_before + offsets]
        return document


def make_windows(num_tokens: int, window_size: int, overlap: int, num_before: int) -> Windows:
    """Return the windows of a text, each of which shares `overlap` tokens with the next.

    Args:
        num_tokens: number of tokens in the text, at least 1.
        window_size: maximum number of tokens in a window, which must exceed `overlap`.
        num_before: number of rows of logits before the text's rows in each sequence.
    """
    starts = range(0, max(1, num_tokens - overlap), window_size - overlap)
    ranges = [(start, min(start + window_size, num_tokens)) for start in starts]
    return Windows(ranges=ranges, num_before=num_before)
