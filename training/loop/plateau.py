"""Plateau alarm: detects a run whose masked-token loss stalls because it learns no context.

A small ALBERT that is trained from scratch learns token frequencies, which takes the masked loss
to the unigram entropy, then to copy the masked tokens that were left in place, and then may stall.
The accuracy of about 12 % that this gives looks like progress and is none (docs/decisions.md).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean
from typing import Final, NamedTuple

# Frequencies and perfect copying explain a loss down to 0.91 of the entropy, by calculation for
# tokens by Zipf's law of which 80 % are masked, 10 % swapped and 10 % left. A lower loss needs
# context. Runs that stalled copied less well, and stalled at 0.93 to 1.
_LEFT_BELOW: Final = 0.91
_STUCK_ABOVE: Final = 0.92
# A loss that falls by more than this fraction of the entropy, from one half of the window to the
# other, still learns.
_FALL: Final = 0.01
# The window is the longest of these: fraction of the run, steps, reports. Runs that learnt, and
# started with the frequencies, first stayed at the entropy for a hundred steps or two.
_WINDOW: Final = 0.05
_MIN_STEPS: Final = 300
_MIN_REPORTS: Final = 10

_ADVICE: Final = (
    "Try attention that begins at the neighbours (--start local), less weight of the sentence "
    "task (--sentence-weight 0.1), lower rates (--lr), or Muon (--optimizer muon); "
    "docs/decisions.md has what was measured"
)


class _Report(NamedTuple):
    step: int
    progress: float
    loss: float
    accuracy: float


class PlateauAlarm:
    """Alarm that is raised when the masked loss stalls at a level that needs no context.

    The window holds the reports after warm-up of the last 5 % of the run, 300 steps or ten
    reports, whichever is longest. The alarm is raised when the mean loss of its newer half is at
    or above 0.92 of the unigram entropy and hardly below that of the older half; it is cleared
    when that mean is below 0.91.

    Attributes:
        is_raised: whether the run is on the plateau now.

    Args:
        unigram_entropy: of the corpus' tokens, in nats.
        warmup: fraction of the run that is warm-up, from 0 to 1.
    """

    def __init__(self, *, unigram_entropy: float, warmup: float) -> None:
        self.is_raised = False
        self._entropy = unigram_entropy
        self._warmup = warmup
        self._window: deque[_Report] = deque()

    def add(self, *, step: int, progress: float, loss: float, accuracy: float) -> str | None:
        """Add a report: mean masked loss (nats) and accuracy since the last one.

        Returns a message when the alarm is raised; None before, while it lasts and after. A report
        whose loss is not finite is ignored.

        Args:
            step: steps done.
            progress: fraction of the run that is done, from 0 to 1.
        """
        if progress < self._warmup or not math.isfinite(loss):
            return None
        self._window.append(_Report(step, progress, loss, accuracy))
        while len(self._window) > _MIN_REPORTS and self._is_long(self._window[1]):
            self._window.popleft()
        was_raised, self.is_raised = self.is_raised, self._is_stuck()
        return self._message() if self.is_raised and not was_raised else None

    def _is_long(self, first: _Report) -> bool:
        """Whether a window that begins with this report is long enough."""
        last = self._window[-1]
        num_steps, part = last.step - first.step, last.progress - first.progress
        return num_steps >= _MIN_STEPS and part >= _WINDOW

    def _is_stuck(self) -> bool:
        losses = [report.loss / self._entropy for report in self._window]
        half = len(losses) // 2
        newer = fmean(losses[half:])
        if self.is_raised:
            return newer >= _LEFT_BELOW
        if len(losses) < _MIN_REPORTS or not self._is_long(self._window[0]):
            return False
        return newer >= _STUCK_ABOVE and fmean(losses[:half]) - newer < _FALL

    def _message(self) -> str:
        first, last = self._window[0], self._window[-1]
        loss = fmean(report.loss for report in self._window)
        accuracy = fmean(report.accuracy for report in self._window)
        return (
            f"plateau: over the {last.step - first.step:,} steps to step {last.step:,} the masked "
            f"loss has stood at {loss:.2f} and the accuracy at {accuracy:.1%}. Token frequencies "
            f"and copying the tokens left in place explain that (unigram entropy "
            f"{self._entropy:.2f}, ratio {loss / self._entropy:.2f}): nothing is learnt from "
            f"context. {_ADVICE}"
        )
