"""A mask rate that changes over a run.

Batches are masked at the higher rate, ahead of their step and maybe in another process; masks over
the rate of the step are taken back when it is known. So masks depend on the seed and the progress
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.data.batch import MicroBatch, PretrainBatch
from training.data.collate import rounded
from training.data.examples import IGNORED

_EPSILON: Final = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskRates:
    """A mask rate that is linear in the run's progress.

    Attributes:
        first: at the run's beginning.
        last: at its end.
    """

    first: float
    last: float

    @property
    def highest(self) -> float:
        """The rate at which batches have to be masked."""
        return max(self.first, self.last)

    @property
    def changes(self) -> bool:
        """Whether the rate at the end is another than that at the beginning."""
        return self.first != self.last

    @property
    def mean(self) -> float:
        """The mean rate over the run."""
        return (self.first + self.last) / 2

    def thin(self, batch: MicroBatch, done: float) -> MicroBatch:
        """Return a batch that was masked at the higher rate with the masks of the progress."""
        if not self.changes or not isinstance(batch, PretrainBatch):
            return batch
        rate = self.first + (self.last - self.first) * done
        return _thinned(batch, rate)


def _thinned(batch: PretrainBatch, rate: float) -> PretrainBatch:
    """Return a batch with fewer masks: the tokens of the others are the original ones."""
    rows, targets, rates = (part.numpy() for part in (batch.rows, batch.targets, batch.rates))
    is_real, is_kept = targets != IGNORED, rates <= rate + _EPSILON
    ids = batch.tokens.ids.clone()
    ids.flatten()[batch.rows[is_real & ~is_kept]] = batch.targets[is_real & ~is_kept]

    def kept(values: NDArray[np.generic], filler: int) -> Tensor:
        return rounded(values[is_real & is_kept], filler)

    return replace(
        batch,
        tokens=replace(batch.tokens, ids=ids),
        rows=kept(rows, 0),
        targets=kept(targets, IGNORED),
        rates=kept(rates, 0),
        counts={**batch.counts, "fill-mask": int((is_real & is_kept).sum())},
    )
