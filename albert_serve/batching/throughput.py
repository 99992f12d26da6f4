"""How fast an engine is, as measured while it works."""

from __future__ import annotations

from typing import Final

_RETRY_AFTER_S: Final = (1.0, 60.0)
_SMOOTHING: Final = 0.2
_BEST_DECAY: Final = 0.99
_LEAST_ELAPSED_S: Final = 1e-6


class Pace:
    """Tokens a second, without padding: what is usual, and the best of late.

    What cannot be done in time is told from the best, so that one slow batch refuses nobody.
    """

    def __init__(self) -> None:
        self._usual_per_s = 0.0
        self._best_per_s = 0.0

    @property
    def least_s_per_token(self) -> float:
        """What a token takes at the best; 0 before anything was measured."""
        return 1 / self._best_per_s if self._best_per_s else 0.0

    @property
    def usual_s_per_token(self) -> float:
        """What a token takes of late; 0 before anything was measured."""
        return 1 / self._usual_per_s if self._usual_per_s else 0.0

    def measure(self, num_tokens: int, elapsed_s: float) -> None:
        """Learn from a batch."""
        rate = num_tokens / max(elapsed_s, _LEAST_ELAPSED_S)
        before = self._usual_per_s or rate
        self._usual_per_s = before + _SMOOTHING * (rate - before)
        # It fades instead of being forgotten at once: no list of a hundred has to be kept.
        self._best_per_s = max(rate, self._best_per_s * _BEST_DECAY)

    def retry_after_s(self, num_tokens: int) -> float:
        """When so many tokens that wait will have been computed: 1 to 60 seconds from now."""
        return limit_retry_after_s(num_tokens * self.usual_s_per_token)


def limit_retry_after_s(seconds: float) -> float:
    """What callers are told to wait, 1 to 60 seconds: by then anything may have changed."""
    least, most = _RETRY_AFTER_S
    return min(most, max(least, seconds))
