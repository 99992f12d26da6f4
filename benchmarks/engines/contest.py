"""Lets contestants find their best ways, and then measures them in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from tqdm import tqdm

from benchmarks.engines.jobs import (
    MEMORY,
    PEAK,
    QUESTIONS,
    TEXTS,
    Contestant,
    Job,
    Kind,
    Memory,
    Opened,
    Peak,
    Request,
    Turn,
)
from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.worker import Worker

T = TypeVar("T")
_STAT: Final = Path("/proc/stat")
_IDLE_FIELDS: Final = (3, 4)  # idle, waiting for a disk
_NUM_FIELDS: Final = 8  # those after them count a second time
# Of a process' stat, after its name: time in user mode and in the kernel.
_PROCESS_FIELDS: Final = (11, 12)
# At which the ways of a contestant are compared; the best one then tries the others.
_FIRST_SIZE: Final = 2
# Taken in turns, so that a short disturbance does not decide.
_NUM_TRIALS: Final = 2
# A larger batch is not tried where one is slower than this part of the best speed.
_FALLS: Final = 0.95


class Child(Worker):
    """A process that holds a model ready.

    Args:
        log: file for the process' output.

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
        """The child's start."""
        return Opened(**self.first_message)

    def turn(self, request: Request) -> Turn:
        """Let the child do a request.

        Raises:
            BenchmarkError: it ended.
        """
        return Turn(**self.ask(asdict(request)))

    def peak(self) -> Peak:
        """Measure the machine's peak, in the process for it.

        Raises:
            BenchmarkError: it ended.
        """
        return Peak(**self.ask(asdict(Request(case=PEAK))))

    def memory(self) -> Memory:
        """Return the child's memory.

        Raises:
            BenchmarkError: it ended.
        """
        return Memory(**self.ask(asdict(Request(case=MEMORY))))


class CpuWatch:
    """Counts the processors' time that other programs, or other machines on the host, took."""

    def __init__(self) -> None:
        self._others_s = 0.0
        self._wall_s = 0.0

    def watch(self, pid: int, action: Callable[[], T]) -> T:
        """Return the action's result; meanwhile only the process `pid` should work."""
        if not _STAT.is_file():
            return action()
        began, busy, own = time.perf_counter(), _busy_s(), _process_s(pid)
        result = action()
        self._others_s += max(0.0, _busy_s() - busy - (_process_s(pid) - own))
        self._wall_s += time.perf_counter() - began
        return result

    @property
    def others(self) -> float | None:
        """CPUs that other programs used on average; None without /proc."""
        return self._others_s / self._wall_s if self._wall_s else None


def _busy_s() -> float:
    """Return the busy seconds of all processors since the machine's start."""
    words = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    counts = [int(word) for word in words[:_NUM_FIELDS]]
    busy = sum(count for place, count in enumerate(counts) if place not in _IDLE_FIELDS)
    return busy / os.sysconf("SC_CLK_TCK")


def _process_s(pid: int) -> float:
    """Return the CPU seconds of a process and all its threads."""
    content = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    words = content.rpartition(")")[2].split()
    return sum(int(words[place]) for place in _PROCESS_FIELDS) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process that took turns: its job, its start, its memory at the end."""

    job: Job
    opened: Opened
    memory: Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The measurements of a contestant.

    Attributes:
        turns: by case, one a round.
        ways: by case, the name of the variant that was its best.
        batch_sizes: by stream; 0 where it forms its batches itself.
        failures: why variants of it, or all, could not take part.
    """

    contestant: Contestant
    turns: Mapping[str, Sequence[Turn]]
    ways: Mapping[str, str]
    batch_sizes: Mapping[str, int]
    processes: Sequence[Process]
    failures: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measurements of a contest.

    Attributes:
        peaks: by case, one a round.
        others: CPUs that other programs used during turns; None where that is not known.
    """

    results: Sequence[Result]
    peaks: Mapping[str, Sequence[Peak]]
    others: float | None


@dataclass(kw_only=True, slots=True)
class _Entry:
    """The state of a contestant: its children and requests by case."""

    contestant: Contestant
    children: dict[str, Child] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def attempt(self, child: Child | None, action: Callable[[], Any]) -> Any:
        """Return the action's result; if it fails, None, and drop the child with the reason."""
        try:
            return action()
        except BenchmarkError as error:
            self.failures.append(str(error))
            for case in [case for case, one in self.children.items() if one is child]:
                del self.children[case], self.requests[case]
                self.turns.pop(case, None)
            return None

    def result(self) -> Result:
        return Result(
            contestant=self.contestant,
            turns=self.turns,
            ways={case: child.job.variant.name for case, child in self.children.items()},
            batch_sizes={
                case: request.batch_size
                for case, request in self.requests.items()
                if kind_of(case) != "shapes"
            },
            processes=self.processes,
            failures=self.failures,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """The measurement of contestants in turns.

    Attributes:
        cases: shapes and streams, in order.
        rounds: turns of each contestant at each case.
        shape_s: for how long calls of a shape are repeated in a turn, at least.
        logs: folder for the processes' output.
        bar: progress, in turns and in contestants that are getting ready.
    """

    cases: Sequence[str]
    rounds: int
    shape_s: float
    logs: Path
    bar: tqdm[Any]

    def run(self, field: Sequence[tuple[Contestant, Sequence[Job]]], peak: Job) -> Measured:
        """Measure the contestants with these jobs, one a variant; and the machine, in turns, too.

        One that fails leaves the contest; the others go on.

        Raises:
            BenchmarkError: the machine cannot be measured.
        """
        with ExitStack() as stack:
            machine = stack.enter_context(Child(peak, self.logs / "peak.log"))
            entries = [self._enter(contestant, jobs, stack) for contestant, jobs in field]
            peaks: dict[str, list[Peak]] = {case: [] for case in self.cases}
            cpu_watch = CpuWatch()
            for number in range(self.rounds):
                for case in self.cases:
                    self.bar.set_postfix_str(f"round {number + 1}, {case}")
                    peaks[case].append(machine.peak())
                    for entry in entries:
                        self._turn(entry, case, cpu_watch)
            for entry in entries:
                _look_at_memory(entry)
            results = [entry.result() for entry in entries]
            return Measured(results=results, peaks=peaks, others=cpu_watch.others)

    def _turn(self, entry: _Entry, case: str, cpu_watch: CpuWatch) -> None:
        if case in entry.children:
            child = entry.children[case]
            action = partial(child.turn, entry.requests[case])
            turn = entry.attempt(child, partial(cpu_watch.watch, child.pid, action))
            if turn is not None:
                entry.turns.setdefault(case, []).append(turn)
        self.bar.update()

    def _enter(self, contestant: Contestant, jobs: Sequence[Job], stack: ExitStack) -> _Entry:
        """The contestant with the best of its variants for each case; the others are closed."""
        entry = _Entry(contestant=contestant)
        best: dict[str, float] = {}
        opened: list[Child] = []
        for job in jobs:
            self.bar.set_postfix_str(f"{job.name} gets ready")
            child = entry.attempt(None, partial(self._open, job, stack))
            opened += [] if child is None else [child]
            self.bar.update()
        for child in opened * _NUM_TRIALS:
            self.bar.set_postfix_str(f"{child.job.name} is tried")
            if child.is_alive:
                entry.attempt(child, partial(self._try, entry, child, len(jobs), best))
        for case, child in [*entry.children.items()]:
            if entry.children.get(case) is not child:
                continue  # it has died meanwhile
            entry.attempt(child, partial(self._search, entry, case, best[case], len(jobs)))
        for child in opened:
            if child not in entry.children.values():
                child.close()
        self._reopen(entry, stack)
        return entry

    def _open(self, job: Job, stack: ExitStack) -> Child:
        words = f"{job.name} {job.task}".replace(",", "").replace("'", "").split()
        log = self.logs / f"{'-'.join(words)}.log"
        return stack.enter_context(Child(job, log))

    def _try(self, entry: _Entry, child: Child, num_rivals: int, best: dict[str, float]) -> None:
        """Take the child for each case at which it is faster than those before it."""
        for case in self.cases:
            if kind_of(case) not in child.job.variant.kinds:
                continue
            request = self._first_request(entry.contestant, case)
            rate = child.turn(request).items_per_s if _asks(case, num_rivals) else 0.0
            if rate > best.get(case, -1.0):
                best[case] = rate
                entry.children[case] = child
                entry.requests[case] = self._final(entry.contestant, request)

    def _first_request(self, contestant: Contestant, case: str) -> Request:
        if kind_of(case) == "shapes":
            return Request(case=case)
        sizes = contestant.batch_sizes
        size = _FIRST_SIZE if _FIRST_SIZE in sizes else sizes[0]
        return Request(case=case, batch_size=size, part="few")

    def _final(self, contestant: Contestant, request: Request) -> Request:
        """Return the request of the rounds."""
        if kind_of(request.case) == "shapes":
            return Request(case=request.case, seconds=self.shape_s)
        return Request(case=request.case, batch_size=request.batch_size, part=contestant.part)

    def _search(self, entry: _Entry, case: str, best: float, num_rivals: int) -> None:
        """Let the best variant try batch sizes, rising, until they are no faster."""
        sizes = entry.contestant.batch_sizes
        if kind_of(case) == "shapes" or len(sizes) == 1:
            return
        for size in sizes:
            if num_rivals > 1 and size == _FIRST_SIZE:
                continue
            request = Request(case=case, batch_size=size, part="few")
            rate = entry.children[case].turn(request).items_per_s
            if rate > best:
                best = rate
                entry.requests[case] = self._final(entry.contestant, request)
            elif rate < _FALLS * best and size > _FIRST_SIZE:
                return

    def _reopen(self, entry: _Entry, stack: ExitStack) -> None:
        """Restart children whose trials have grown their memory, except compiled ones."""
        if len(entry.contestant.batch_sizes) == 1:
            return
        for child in dict.fromkeys(entry.children.values()):
            if not child.job.variant.compiles:
                child.close()
                fresh = entry.attempt(child, partial(self._open, child.job, stack))
                for case in [case for case, one in entry.children.items() if one is child]:
                    entry.children[case] = fresh


def kind_of(case: str) -> Kind:
    """Return the kind of a case."""
    if case == TEXTS:
        return "texts"
    return "questions" if case == QUESTIONS else "shapes"


def _asks(case: str, num_rivals: int) -> bool:
    """Shapes are always tried, because a first call does more than later ones."""
    return kind_of(case) == "shapes" or num_rivals > 1


def _look_at_memory(entry: _Entry) -> None:
    for child in dict.fromkeys(entry.children.values()):
        memory = entry.attempt(child, child.memory)
        if memory is not None:
            entry.processes.append(Process(job=child.job, opened=child.opened, memory=memory))
