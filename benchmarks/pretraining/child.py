"""The parent's side: a child process that trains in turns."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.worker import Worker
from benchmarks.pretraining.jobs import Turn, TurnJob


class Child(Worker):
    """A process that does a job; inside `with` it is warm.

    Args:
        log: file for the process' output.

    Raises:
        BenchmarkError: it ended before its time.
    """

    def __init__(self, job: TurnJob, log: Path) -> None:
        super().__init__(
            name=job.name,
            module=job.program,
            argument=job.to_json(),
            environment=job.environment,
            log=log,
        )
        self.job = job

    @property
    def warm_up_s(self) -> float:
        """Seconds from the construction of the model to the end of its first steps."""
        seconds: float = self.first_message["warm_up_s"]
        return seconds

    def turn(self, seconds: float) -> Turn:
        """Let it train for so long, and finish its step.

        Raises:
            BenchmarkError: it ended.
        """
        return Turn(**self.ask({"seconds": seconds}))
