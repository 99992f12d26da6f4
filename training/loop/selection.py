"""The best validation of a run by one figure, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from training.evaluation.metrics import LOWEST

_STATE: Final = ("figure", "best_step", "best", "num_since", "validated_step")


@dataclass(kw_only=True)
class Selection:
    """The best validation of a run so far.

    Attributes:
        figure: name of the figure that decides, such as `accuracy`; the highest is the best, of
            `loss` and `mse` the lowest.
        chance: the figure of one answer for all texts, where it is known.
        patience: validations in a row without a new best after which the run stops; None to go on.
        best: the best figure so far; None before the first.
        best_step: its step.
        num_since: validations since then.
        validated_step: step of the last validation.
    """

    figure: str
    chance: float | None = None
    patience: int | None = None
    best: float | None = None
    best_step: int | None = None
    num_since: int = 0
    validated_step: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the run stops early."""
        return self.patience is not None and self.num_since >= self.patience

    @property
    def has_collapsed(self) -> bool:
        """Whether the best figure is not over that of one answer for all texts."""
        if self.best is None or self.chance is None:
            return self.best is None and self.validated_step > 0
        return not _is_better(self.figure, self.best, self.chance)

    def take(self, step: int, figures: Mapping[str, float]) -> bool:
        """Take the figures of a validation; return whether it is the best so far.

        Of equal ones the first is the best. A figure that is nan is never the best.
        """
        value = figures[self.figure]
        self.validated_step = step
        if self._is_better(value):
            self.best, self.best_step, self.num_since = value, step, 0
            return True
        self.num_since += 1
        return False

    def _is_better(self, value: float) -> bool:
        if self.best is None or math.isnan(value):
            return not math.isnan(value)
        return _is_better(self.figure, value, self.best)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; none of one that another figure decided."""
        if state.get("figure") == self.figure:
            for name in _STATE:
                setattr(self, name, state[name])

    def describe(self) -> str:
        """Describe the best validation."""
        if self.best is None:
            return f"none has a {self.figure}"
        return f"{self.figure} {self.best:.4f} at step {self.best_step:,}"


def _is_better(figure: str, value: float, other: float) -> bool:
    return value < other if figure in LOWEST else value > other
