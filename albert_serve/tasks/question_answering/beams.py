"""The best spans of a document by a start-conditioned head, as in ALBERT's run_squad_v2.

In each window the 5 likeliest starts, and for each the 5 likeliest ends given that start, are
candidates. Their scores are the logarithms of probabilities over the window, where [CLS] stands for
"not here"; so those of all windows compare. A start counts in the window where its shorter side of
context is longest, as in the original.

Shape legend: n tokens of a window's context, K outputs of the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from albert_serve.bundle.weights import NUM_BEAMS
from albert_serve.tasks.base import Logits
from albert_serve.tasks.probability import finite, log_softmax
from albert_serve.tasks.question_answering.spans import Spans, merged
from albert_serve.tasks.question_answering.windows import Windows

# A span of tokens, first and last, and its logit.
_Candidate = tuple[int, int, float]


def find_beams(
    windows: Windows,
    logits: Sequence[Logits],
    offsets: Sequence[tuple[int, int]],
    *,
    max_answer_len: int,
) -> Spans:
    """Find the best spans of at most `max_answer_len` tokens; at most 25 a window.

    The null score is the answerability logit of the window that doubts least: an answer in one
    window is an answer in the document.

    Args:
        windows: the windows of the document.
        logits: (1 + n, K) for each window, in order, of [CLS] and its context: start, answerability
            (the same in all rows), and the end given each of the best starts.
        offsets: the characters of each token of the document.
        max_answer_len: tokens of the longest span.

    Raises:
        EngineError: a logit is not finite.
    """
    bounds = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    owners = windows.owners()
    found: list[_Candidate] = []
    owned: list[_Candidate] = []
    for number, ((begin, _), window) in enumerate(zip(windows.ranges, logits, strict=True)):
        for candidate in _candidates(window, begin, bounds, max_answer_len):
            found.append(candidate)
            if owners[candidate[0]] == number:
                owned.append(candidate)
    best = merged(
        (int(bounds[first, 0]), int(bounds[last, 1]), logit)
        for first, last, logit in owned or found
    )
    null_score = min(float(finite(window)[0, 1]) for window in logits)
    return Spans(best=best, no_answer=(best[0].logit if best else 0.0) + null_score)


def best_starts(start_logits: Logits) -> NDArray[np.int64]:
    """Return the rows of the best starts, as the head has them; of equal ones the first."""
    return np.argsort(-start_logits, kind="stable")[:NUM_BEAMS]


def _candidates(
    window: Logits, begin: int, bounds: NDArray[np.int64], longest: int
) -> Iterator[_Candidate]:
    """Yield the spans of a window whose context begins at the token `begin`.

    A span is not empty, and does not begin or end with a token of white space alone. The ends are
    the best ones of spans; the original takes the best ones of all, and drops what is no span.
    """
    start_logs = log_softmax(window[:, 0])
    for beam, row in enumerate(best_starts(window[:, 0]).tolist()):
        first = begin + row - 1
        if row == 0 or bounds[first, 1] <= bounds[first, 0]:
            continue
        rows = np.arange(row, min(row + longest, len(window)))
        lasts = bounds[begin + rows - 1]
        rows = rows[(lasts[:, 1] > lasts[:, 0]) & (lasts[:, 1] > bounds[first, 0])]
        end_logs = log_softmax(window[:, 2 + beam])[rows]
        for place in np.argsort(-end_logs, kind="stable")[:NUM_BEAMS].tolist():
            yield first, begin + int(rows[place]) - 1, float(start_logs[row] + end_logs[place])
