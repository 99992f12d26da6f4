"""The parent's side: the process of a contestant."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.engines.jobs import MEMORY, PEAK, Job, Memory, Opened, Peak, Request, Turn
from benchmarks.harness.worker import Worker


class Child(Worker):
    """A process that holds a model ready.

    Args:
        log: file that takes what the process prints.

    Raises:
        BenchmarkError: it ended before its time.
    """

    def __init__(self, job: Job, log: Path) -> None:
        super().__init__(
            name=job.name,
            module=f"benchmarks.engines.{job.variant.program}",
            argument=job.to_json(),
            environment=job.environment,
            log=log,
        )
        self.job = job

    @property
    def opened(self) -> Opened:
        """How it came up."""
        return Opened(**self.first_message)

    def turn(self, request: Request) -> Turn:
        """Let it do what is asked for.

        Raises:
            BenchmarkError: it ended.
        """
        return Turn(**self.ask(asdict(request)))

    def peak(self) -> Peak:
        """What the machine can do now; of the process that measures it.

        Raises:
            BenchmarkError: it ended.
        """
        return Peak(**self.ask(asdict(Request(case=PEAK))))

    def memory(self) -> Memory:
        """What it takes now.

        Raises:
            BenchmarkError: it ended.
        """
        return Memory(**self.ask(asdict(Request(case=MEMORY))))
