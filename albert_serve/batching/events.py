"""Events of the queue, for metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """A batch that the engine has run.

    Attributes:
        num_inputs: inputs that ran together.
        num_tokens: their tokens, without padding.
        num_padded_tokens: their tokens, with padding.
        engine_s: seconds that the engine took.
        queue_delays_s: by task, the seconds that each input waited.
    """

    num_inputs: int
    num_tokens: int
    num_padded_tokens: int
    engine_s: float
    queue_delays_s: dict[str, list[float]]


class BatchObserver(Protocol):
    """Receives events, on the event loop. The task is that of a request's first input."""

    def queued(self, task: str, num_tokens: int) -> None:
        """Record that a request entered the queue."""
        ...

    def batch(self, report: BatchReport) -> None:
        """Record that a batch was run."""
        ...

    def shed(self, task: str) -> None:
        """Record that a request was refused because the queue is full."""
        ...

    def expired(self, task: str) -> None:
        """Record that a request missed its deadline, or would have."""
        ...

    def cancelled(self, task: str) -> None:
        """Record that a request's caller disconnected before the answer."""
        ...


class NoObserver:
    """Ignores all events."""

    def queued(self, task: str, num_tokens: int) -> None:
        """Ignore the event."""

    def batch(self, report: BatchReport) -> None:
        """Ignore the event."""

    def shed(self, task: str) -> None:
        """Ignore the event."""

    def expired(self, task: str) -> None:
        """Ignore the event."""

    def cancelled(self, task: str) -> None:
        """Ignore the event."""
