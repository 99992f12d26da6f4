"""Lets contestants find their best ways, and then measures them in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from tqdm import tqdm

from benchmarks.engine.contestants import (
    TEXTS,
    CaseKind,
    Contestant,
    EngineTurn,
    ModelJob,
    Opening,
    Peak,
    TurnRequest,
)
from benchmarks.harness.process import BenchmarkError, Worker

T = TypeVar("T")
# At which the ways of a contestant are compared; the best one then tries the others.
_FIRST_SIZE: Final = 2
# Taken in turns, so that a short disturbance does not decide.
_NUM_TRIALS: Final = 2
# A larger batch is not tried where one is slower than this part of the best speed.
_FALLS: Final = 0.95


class ModelProcess(Worker):
    """A process that holds a model ready; inside `with` it is open."""

    def __init__(self, job: ModelJob, folder: Path) -> None:
        words = job.name.replace(",", "").replace("'", "").split()
        super().__init__(
            job.name,
            f"benchmarks.engine.{job.variant.module}",
            job,
            environment=job.environment,
            log=folder / f"{'-'.join(words)}.log",
        )
        self.job = job
        self.opening = Opening(load_s=0.0, import_bytes=0)

    def __enter__(self) -> ModelProcess:
        super().__enter__()
        self.opening = self.receive()
        return self

    def turn(self, request: TurnRequest) -> EngineTurn:
        """Let it do a turn; raises as `ask`."""
        turn: EngineTurn = self.ask(request)
        return turn


@dataclass(kw_only=True, slots=True)
class EngineResult:
    """The measurements of a contestant.

    Attributes:
        turns: by case, one a round.
        requests: by case, the turn that it is asked for.
        ways: by case, the name of the variant that was its best.
        openings: by job, with the resident memory at the end.
        failures: why variants of it, or all, could not take part.
    """

    contestant: Contestant
    turns: dict[str, list[EngineTurn]] = field(default_factory=dict)
    requests: dict[str, TurnRequest] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)
    openings: list[tuple[ModelJob, Opening, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMeasurement:
    """The measurements of a contest.

    Attributes:
        peaks: by case, one a round.
    """

    results: Sequence[EngineResult]
    peaks: Mapping[str, Sequence[Peak]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineContest:
    """The measurement of contestants in turns.

    Attributes:
        cases: shapes and the stream, in order.
        rounds: turns of each contestant at each case.
        shape_s: for how long calls of a shape are repeated in a turn, at least.
        logs: folder for the processes' output.
        bar: progress, in turns and in contestants that are getting ready.
    """

    cases: Sequence[str]
    rounds: int
    shape_s: float
    num_threads: int
    logs: Path
    bar: tqdm[Any]

    def run(self, jobs: Sequence[tuple[Contestant, Sequence[ModelJob]]]) -> EngineMeasurement:
        """Measure the contestants with these jobs, one a variant; and the machine, in turns, too.

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
            entrants = [self._enter(contestant, each, stack) for contestant, each in jobs]
            peaks: dict[str, list[Peak]] = {case: [] for case in self.cases}
            for number in range(self.rounds):
                for case in self.cases:
                    self.bar.set_postfix_str(f"round {number + 1}, {case}")
                    peaks[case].append(machine.ask("peak"))
                    for entrant in entrants:
                        entrant.take_turn(case)
                        self.bar.update()
            return EngineMeasurement(
                results=[entrant.finish() for entrant in entrants],
                peaks=peaks,
            )

    def _enter(
        self, contestant: Contestant, jobs: Sequence[ModelJob], stack: ExitStack
    ) -> _Entrant:
        """Return the contestant with the best of its variants for each case."""
        entrant = _Entrant(EngineResult(contestant=contestant), self, stack)
        opened = []
        for job in jobs:
            self.bar.set_postfix_str(f"{job.name} gets ready")
            process = entrant.attempt(None, partial(entrant.open, job))
            opened += [] if process is None else [process]
            self.bar.update()
        for process in opened * _NUM_TRIALS:
            self.bar.set_postfix_str(f"{process.job.name} is tried")
            if process.is_alive:
                entrant.attempt(process, partial(entrant.try_cases, process, len(jobs)))
        entrant.search_batch_size(len(jobs))
        for process in opened:
            if process not in entrant.processes.values():
                process.close()
        entrant.restart()
        return entrant


class _Entrant:
    """The state of a contestant: its processes by case, and what they gave."""

    def __init__(self, result: EngineResult, contest: EngineContest, stack: ExitStack) -> None:
        self._result, self._contest, self._stack = result, contest, stack
        self._best: dict[str, float] = {}
        self.processes: dict[str, ModelProcess] = {}

    def open(self, job: ModelJob) -> ModelProcess:
        return self._stack.enter_context(ModelProcess(job, self._contest.logs))

    def attempt(self, process: ModelProcess | None, action: Callable[[], T]) -> T | None:
        """Return the action's result; if it fails, None, and drop the process with the reason."""
        try:
            return action()
        except BenchmarkError as error:
            self._result.failures.append(str(error))
            for case in [case for case, one in self.processes.items() if one is process]:
                del self.processes[case], self._result.requests[case]
                self._result.turns.pop(case, None)
            return None

    def try_cases(self, process: ModelProcess, num_rivals: int) -> None:
        """Take the process for each case at which it is faster than those before it."""
        contestant = self._result.contestant
        sizes = contestant.batch_sizes
        first_size = _FIRST_SIZE if _FIRST_SIZE in sizes else sizes[0]
        for case in self._contest.cases:
            if kind_of(case) not in process.job.variant.kinds:
                continue
            trial, final = TurnRequest(case=case), self._final(case, first_size)
            if case == TEXTS:
                trial = TurnRequest(case=case, batch_size=first_size, part="few")
            # Shapes are always tried, because a first call does more than later ones.
            asks = case != TEXTS or num_rivals > 1
            rate = process.turn(trial).items_per_s if asks else 0.0
            if rate > self._best.get(case, -1.0):
                self._best[case] = rate
                self.processes[case] = process
                self._result.requests[case] = final

    def search_batch_size(self, num_rivals: int) -> None:
        """Let the best variant try batch sizes of the stream, rising, until they are no faster."""
        process = self.processes.get(TEXTS)
        if process is not None and len(self._result.contestant.batch_sizes) > 1:
            self.attempt(process, partial(self._search, process, num_rivals))

    def _search(self, process: ModelProcess, num_rivals: int) -> None:
        best = self._best[TEXTS]
        for size in self._result.contestant.batch_sizes:
            if num_rivals > 1 and size == _FIRST_SIZE:
                continue
            trial = TurnRequest(case=TEXTS, batch_size=size, part="few")
            rate = process.turn(trial).items_per_s
            if rate > best:
                best = rate
                self._result.requests[TEXTS] = self._final(TEXTS, size)
            elif rate < _FALLS * best and size > _FIRST_SIZE:
                return

    def _final(self, case: str, batch_size: int) -> TurnRequest:
        """Return the request of the rounds."""
        if case != TEXTS:
            return TurnRequest(case=case, seconds=self._contest.shape_s)
        part = self._result.contestant.part
        return TurnRequest(case=case, batch_size=batch_size, part=part)

    def restart(self) -> None:
        """Restart processes whose trials have grown their memory, except compiled ones."""
        if len(self._result.contestant.batch_sizes) == 1:
            return
        for process in dict.fromkeys(self.processes.values()):
            if process.job.variant.compiles:
                continue
            process.close()
            fresh = self.attempt(process, partial(self.open, process.job))
            if fresh is not None:
                for case in [case for case, one in self.processes.items() if one is process]:
                    self.processes[case] = fresh

    def take_turn(self, case: str) -> None:
        process = self.processes.get(case)
        if process is None:
            return
        turn = self.attempt(process, partial(process.turn, self._result.requests[case]))
        if turn is not None:
            self._result.turns.setdefault(case, []).append(turn)

    def finish(self) -> EngineResult:
        """Return the result, with the memory of each process after its last turn."""
        result = self._result
        result.ways = {case: each.job.variant.name for case, each in self.processes.items()}
        for process in dict.fromkeys(self.processes.values()):
            last = [case for case, each in self.processes.items() if each is process][-1]
            memory = result.turns[last][-1].rss_bytes
            result.openings.append((process.job, process.opening, memory))
        return result


def kind_of(case: str) -> CaseKind:
    """Return the kind of a case."""
    return "texts" if case == TEXTS else "shapes"
