"""The best validation of a run by one metric, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from training.errors import RunError

# Metrics whose lower values are better.
LOWER_IS_BETTER: Final = frozenset({"loss", "mse"})
_STATE: Final = ("best_step", "best", "num_since")


@dataclass(kw_only=True)
class BestValidation:
    """The best validation of a run so far.

    Attributes:
        metric: name of the metric that selects, such as `accuracy`. Higher values are better,
            except for `loss` and `mse`.
        criterion: description of the metric and the held-out data, which must be the same when
            the run is resumed.
        patience: number of consecutive validations without a new best value after which the run
            stops, or None to continue.
        best: best value so far, or None before the first validation.
        best_step: step of the best value.
        num_since: number of validations since the best value.
    """

    metric: str
    criterion: str = ""
    patience: int | None = None
    best: float | None = None
    best_step: int | None = None
    num_since: int = 0

    @property
    def stops_early(self) -> bool:
        """Whether the run stops early."""
        return self.patience is not None and self.num_since >= self.patience

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Count a validation; return whether it is the best so far.

        Of several equal values, the first is the best. NaN is never the best.
        """
        is_best = self.update_best(step, metrics)
        self.num_since += not is_best
        return is_best

    def update_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Do the same as `update`, but do not count a worse validation against patience."""
        value = metrics[self.metric]
        sign = -1 if self.metric in LOWER_IS_BETTER else 1
        is_better = self.best is None or sign * value > sign * self.best
        if math.isnan(value) or not is_better:
            return False
        self.best, self.best_step, self.num_since = value, step, 0
        return True

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {"measured": self.criterion, **{name: getattr(self, name) for name in _STATE}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, which is empty for a run without validation."""
        if not state:
            return
        if state["measured"] != self.criterion:
            raise RunError(
                f"The run selects its best checkpoint by {state['measured']}, not "
                f"{self.criterion}. Resume it with the same --metric and --validation, or choose "
                "another --output."
            )
        for name in _STATE:
            setattr(self, name, state[name])

    def report(self, done: float, best: Path) -> Iterator[str]:
        """Yield the lines to print at the end of a run: early stopping and the best validation."""
        if done < 1:
            yield (
                f"Stopped early at {done:.1%}, after {self.num_since} validations without a better "
                "one. To continue, repeat the command with a larger --patience."
            )
        yield f"The best validation, in {best}: {self._describe()}."

    def _describe(self) -> str:
        if self.best is None:
            return f"none has a value of {self.metric}"
        if self.best_step == 0:
            return f"{self.metric} {self.best:.4f}, of the weights before the first step"
        return f"{self.metric} {self.best:.4f} at step {self.best_step:,}"
