"""Runs children in turns, and looks for the settings at which `transformers` is fastest."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.harness.errors import BenchmarkError
from benchmarks.pretraining.child import Child
from benchmarks.pretraining.jobs import HfSettings, Job, Turn, TurnJob
from benchmarks.pretraining.ours import build

_LOADING_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The measurements of a contestant.

    Attributes:
        warm_up_s: from the model's beginning to the end of its first steps, compilation included.
        turns: in order; none where it failed.
        failure: why there are none.
    """

    job: TurnJob
    warm_up_s: float
    turns: Sequence[Turn]
    failure: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Median over turns, of wall clock."""
        return statistics.median(turn.tokens_per_s for turn in self.turns)

    @property
    def tokens_per_cpu_s(self) -> float:
        """Median over turns, of processors' time."""
        return statistics.median(turn.tokens_per_cpu_s for turn in self.turns)

    @property
    def peak_bytes(self) -> int:
        """The most memory of all turns."""
        return max(turn.peak_bytes for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """The measurement of children in turns.

    Attributes:
        rounds: turns of each child that count; one before them does not.
        turn_s: shortest time of a turn, which ends with the step that passes it.
        logs: folder for the children's output.
        bar: progress, in turns and starts of children.
    """

    rounds: int
    turn_s: float
    logs: Path
    bar: tqdm[Any]

    def measure(self, jobs: Sequence[TurnJob]) -> list[Result]:
        """Measure these jobs.

        On a CPU they take turns, so that other programs disturb them alike; on a GPU, whose
        memory they would share, they run one after the other.

        Raises:
            BenchmarkError: the job of ours failed.
        """
        if jobs[0].device == "cuda":
            return [result for job in jobs for result in self._together([job])]
        return self._together(jobs)

    def fastest(self, candidates: Sequence[TurnJob]) -> TurnJob:
        """The job among those of `transformers` that is fastest in a single turn.

        Raises:
            BenchmarkError: all of them failed.
        """
        if len(candidates) == 1:
            return candidates[0]
        short = replace(self, rounds=1)
        results = [result for job in candidates for result in short._together([job])]
        done = [result for result in results if result.turns]
        if not done:
            raise BenchmarkError(results[0].failure)
        on_cpu = candidates[0].device == "cpu"
        rate: Callable[[Result], float] = lambda result: (  # noqa: E731
            result.tokens_per_cpu_s if on_cpu else result.tokens_per_s
        )
        return max(done, key=rate).job

    def _together(self, jobs: Sequence[TurnJob]) -> list[Result]:
        with ExitStack() as stack:
            failures: dict[str, str] = {}
            children = list(self._start(jobs, stack, failures))
            turns: dict[str, list[Turn]] = {child.job.name: [] for child in children}
            for number in range(self.rounds + 1):
                for child in children:
                    self.bar.set_postfix_str(f"{child.job.title}: {child.job.name}")
                    turn = child.turn(self.turn_s)
                    if number:  # the first one warms caches
                        turns[child.job.name].append(turn)
                    self.bar.update()
            warm_up_s = {child.job.name: child.warm_up_s for child in children}
            return [
                Result(
                    job=job,
                    warm_up_s=warm_up_s.get(job.name, 0.0),
                    turns=turns.get(job.name, []),
                    failure=failures.get(job.name, ""),
                )
                for job in jobs
            ]

    def _start(
        self, jobs: Sequence[TurnJob], stack: ExitStack, failures: dict[str, str]
    ) -> Iterator[Child]:
        """Return the children that are warm; `failures` gets the errors of the others."""
        for number, job in enumerate(jobs):
            self.bar.set_postfix_str(f"{job.title}: {job.name}, warming up")
            log = self.logs / f"{re.sub('[^a-z0-9]+', '-', job.title.lower())}-{number}.log"
            try:
                yield stack.enter_context(Child(job, log))
            except BenchmarkError as error:
                if job.hf is None:
                    raise
                failures[job.name] = str(error)
            self.bar.update()


def hf_jobs(job: Job, settings: Sequence[HfSettings]) -> list[Job]:
    """The same job as `transformers` does it, in each of these ways."""
    return [replace(job, hf=each) for each in settings]


def loading_rate(job: Job) -> float:
    """Real tokens a second that one process cuts, masks and packs for ours, without training."""
    feed = build(replace(job, compiles=False, device="cpu")).streams[0]
    feed.step()
    num_tokens, began = 0, time.perf_counter()
    while time.perf_counter() - began < _LOADING_S:
        num_tokens += sum(one.num_tokens for one in feed.step())
    return num_tokens / (time.perf_counter() - began)
