"""Measures contestants in turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.engine.contestants import TEXTS, Contestant, EngineTurn, ModelJob, Opening
from benchmarks.harness.process import BenchmarkError, Worker


@dataclass(kw_only=True, slots=True)
class EngineResult:
    """The measurements of a contestant.

    Attributes:
        turns: by case, one a round; none where it failed.
        opening: None where it could not be opened.
        failure: why it could not go on.
    """

    contestant: Contestant
    turns: dict[str, list[EngineTurn]] = field(default_factory=dict)
    opening: Opening | None = None
    failure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineContest:
    """The measurement of contestants in turns.

    Attributes:
        cases: shapes and the stream, in order.
        rounds: turns of each contestant at each case; one before them does not count.
        logs: folder for the processes' output.
    """

    cases: Sequence[str]
    rounds: int
    num_threads: int
    logs: Path
    bar: tqdm[Any]

    def run(self, jobs: Sequence[ModelJob]) -> tuple[list[EngineResult], dict[str, list[float]]]:
        """Measure contestants, and the machine's peak by case and round, in turns, too.

        One that fails leaves the contest; the others go on.

        Raises:
            BenchmarkError: the machine cannot be measured.
        """
        with ExitStack() as stack:
            machine = Worker(
                "the machine",
                "benchmarks.engine.peak",
                self.num_threads,
                log=self.logs / "peak.log",
                environment={"OMP_NUM_THREADS": str(self.num_threads)},
            )
            stack.enter_context(machine).receive()
            entrants = [self._open(job, stack) for job in jobs]
            peaks: dict[str, list[float]] = {case: [] for case in self.cases}
            for number in range(self.rounds + 1):
                for case in self.cases:
                    self.bar.set_postfix_str(f"round {number}, {case}")
                    peak = machine.ask("peak")
                    if number:  # the first one warms caches, and kernels of new lengths are made
                        peaks[case].append(peak)
                    for result, process in entrants:
                        _take_turn(result, process, case, counts=number > 0)
                        self.bar.update()
            return [result for result, _ in entrants], peaks

    def _open(self, job: ModelJob, stack: ExitStack) -> tuple[EngineResult, Worker]:
        contestant = job.contestant
        self.bar.set_postfix_str(f"{contestant.name} gets ready")
        process = Worker(
            contestant.name,
            f"benchmarks.engine.{contestant.module}",
            job,
            environment=job.environment,
            log=self.logs / f"{contestant.name.replace(',', '').replace(' ', '-')}.log",
        )
        result = EngineResult(contestant=contestant)
        try:
            result.opening = stack.enter_context(process).receive()
        except BenchmarkError as error:
            result.failure = str(error)
        return result, process


def _take_turn(result: EngineResult, process: Worker, case: str, *, counts: bool) -> None:
    kind = TEXTS if case == TEXTS else "shapes"
    if result.failure or kind not in result.contestant.kinds:
        return
    try:
        turn = process.ask(case)
    except BenchmarkError as error:
        result.failure = str(error)
        result.turns.clear()
        return
    if counts:
        result.turns.setdefault(case, []).append(turn)
