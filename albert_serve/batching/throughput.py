"""The throughput of an engine, measured on its batches."""

from __future__ import annotations

from typing import Final

_RETRY_AFTER_S: Final = (1.0, 60.0)
_SMOOTHING: Final = 0.2
_BEST_DECAY: Final = 0.99
_LEAST_ELAPSED_S: Final = 1e-6


class Throughput:
    """Tokens a second, without padding: the usual throughput, and the best recent one.

    Requests are refused as impossible by the best one, so that a slow batch refuses nobody.
    """

    def __init__(self) -> None:
        self._usual_per_s = 0.0
        self._best_per_s = 0.0

    @property
    def best_s_per_token(self) -> float:
        """Seconds a token at the best throughput; 0 before the first batch."""
        return 1 / self._best_per_s if self._best_per_s else 0.0

    @property
    def usual_s_per_token(self) -> float:
        """Seconds a token at the usual throughput; 0 before the first batch."""
        return 1 / self._usual_per_s if self._usual_per_s else 0.0

    def measure(self, num_tokens: int, elapsed_s: float) -> None:
        """Update the throughput with a batch."""
        rate = num_tokens / max(elapsed_s, _LEAST_ELAPSED_S)
        before = self._usual_per_s or rate
        self._usual_per_s = before + _SMOOTHING * (rate - before)
        # Decays instead of a sliding maximum, which would need a list of rates.
        self._best_per_s = max(rate, self._best_per_s * _BEST_DECAY)

    def retry_after_s(self, num_tokens: int) -> float:
        """Return the time to compute the queued tokens, limited to 1 to 60 seconds."""
        return limit_retry_after_s(num_tokens * self.usual_s_per_token)


def limit_retry_after_s(seconds: float) -> float:
    """Limit the time that callers are told to wait to 1 to 60 seconds."""
    least, most = _RETRY_AFTER_S
    return min(most, max(least, seconds))
