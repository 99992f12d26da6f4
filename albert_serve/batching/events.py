"""Events of the queue, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


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


class BatchObserver:
    """Receives events, on the event loop, and ignores them.

    The task of a request is the endpoint of its first input.
    """

    def queued(self, task: str, num_tokens: int) -> None:
        """Record that a request entered the queue."""

    def batch(self, report: BatchReport) -> None:
        """Record that a batch was run."""

    def cancelled(self, task: str) -> None:
        """Record that a request's caller disconnected before the answer."""

    def shed(self, task: str) -> None:
        """Record that a request was refused for want of room or time; the batcher does not."""

    def expired(self, task: str) -> None:
        """Record that a request missed its deadline, or would have; the batcher does not."""
