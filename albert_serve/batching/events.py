"""What the queue tells of what it does, for metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """A batch that the engine has run.

    Attributes:
        num_inputs: how many ran together.
        num_tokens: theirs, without padding.
        num_padded_tokens: theirs, with padding.
        engine_s: seconds that the engine took.
        queue_delays_s: of each task the seconds that each of its inputs had waited.
    """

    num_inputs: int
    num_tokens: int
    num_padded_tokens: int
    engine_s: float
    queue_delays_s: dict[str, list[float]]


class BatchObserver(Protocol):
    """Who is told what happens, on the event loop. The task is that of a request's first input."""

    def queued(self, task: str, num_tokens: int) -> None:
        """A request has entered the queue."""
        ...

    def batch(self, report: BatchReport) -> None:
        """A batch has been run."""
        ...

    def shed(self, task: str) -> None:
        """A request was refused, for the queue was full."""
        ...

    def expired(self, task: str) -> None:
        """A request was given up, for it was late or would have been."""
        ...

    def cancelled(self, task: str) -> None:
        """A request's caller has gone before it was answered."""
        ...


class NoObserver:
    """Tells nobody."""

    def queued(self, task: str, num_tokens: int) -> None:
        """Nothing."""

    def batch(self, report: BatchReport) -> None:
        """Nothing."""

    def shed(self, task: str) -> None:
        """Nothing."""

    def expired(self, task: str) -> None:
        """Nothing."""

    def cancelled(self, task: str) -> None:
        """Nothing."""
