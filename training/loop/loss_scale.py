"""The loss scale of fp16, in which small gradients would be 0 (arXiv 1710.03740, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Steps with a finite gradient after which the scale is doubled.
_GROWS_AFTER: Final = 2000
_HIGHEST: Final = 2.0**24


@dataclass(kw_only=True)
class LossScale:
    """A power of two: halved at each gradient that is not finite, doubled after many that are.

    Attributes:
        num_finite: steps since the last change.
    """

    value: float = 2.0**16
    num_finite: int = 0

    def explains(self) -> bool:
        """Halve the scale after a gradient that is not finite; whether it may be the reason."""
        self.num_finite = 0
        if self.value <= 1:
            return False
        self.value /= 2
        return True

    def count_finite(self) -> None:
        """Count a step whose gradient was finite."""
        self.num_finite += 1
        if self.num_finite == _GROWS_AFTER and self.value < _HIGHEST:
            self.value, self.num_finite = self.value * 2, 0
