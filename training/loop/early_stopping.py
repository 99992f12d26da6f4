"""The best validation of a run by one figure, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from training.errors import RunError

# The figures of which the lowest is the best.
LOWEST: Final = frozenset({"loss", "mse"})
_STATE: Final = ("best_step", "best", "num_since")


@dataclass(kw_only=True)
class BestValidation:
    """The best validation of a run so far.

    Attributes:
        figure: name of the figure that decides, such as `accuracy`; the highest is the best, of
            `loss` and `mse` the lowest.
        measured: the figure and the held-out data in words, by which a run is resumed.
        patience: validations in a row without a new best after which the run stops; None to go on.
        best: the best figure so far; None before the first.
        best_step: its step.
        num_since: validations since then.
    """

    figure: str
    measured: str = ""
    patience: int | None = None
    best: float | None = None
    best_step: int | None = None
    num_since: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the run stops early."""
        return self.patience is not None and self.num_since >= self.patience

    def take(self, step: int, figures: Mapping[str, float]) -> bool:
        """Take the figures of a validation; return whether it is the best so far.

        Of equal ones the first is the best. A figure that is nan is never the best.
        """
        is_best = self.improve(step, figures)
        self.num_since += not is_best
        return is_best

    def improve(self, step: int, figures: Mapping[str, float]) -> bool:
        """Take the figures if they are the best, as `take`; patience does not count them if not."""
        value = figures[self.figure]
        sign = -1 if self.figure in LOWEST else 1
        is_better = self.best is None or sign * value > sign * self.best
        if math.isnan(value) or not is_better:
            return False
        self.best, self.best_step, self.num_since = value, step, 0
        return True

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {name: getattr(self, name) for name in ("measured", *_STATE)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; none of a run that had no validation."""
        if not state:
            return
        if state["measured"] != self.measured:
            raise RunError(
                f"the run selects its best checkpoint by {state['measured']}, not {self.measured}; "
                "resume it with the same --metric and --validation, or give another --output"
            )
        for name in _STATE:
            setattr(self, name, state[name])

    def report(self, done: float, best: Path) -> Iterator[str]:
        """Yield lines on the end of a run: early stopping, and the best validation."""
        if done < 1:
            yield (
                f"stopped early at {done:.1%}: no better validation in {self.num_since}; "
                "a larger --patience goes on"
            )
        yield f"the best validation, in {best}: {self._describe()}"

    def _describe(self) -> str:
        if self.best is None:
            return f"none has a {self.figure}"
        if self.best_step == 0:
            return f"{self.figure} {self.best:.4f}, of the weights before the first step"
        return f"{self.figure} {self.best:.4f} at step {self.best_step:,}"
