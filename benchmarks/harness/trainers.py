"""Training in turns: two sides that train the same, each in a process of its own.

On a CPU both processes are alive at the same time and train in turns, while the other one sleeps,
so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from torch._dynamo.utils import counters
from tqdm import tqdm

from albert_serve.config import PRESETS, AlbertConfig
from benchmarks.harness.page import bullets, table
from benchmarks.harness.process import (
    REPOSITORY,
    BenchmarkError,
    Channel,
    Worker,
    failure_kind,
)
from training.loop.step import Run
from training.options.device import add_device
from training.options.values import parse_count, parse_duration
from training.system.memory import keep_freed_memory

# Read by glibc's malloc and by torch when a process begins: memory that a step gives back stays
# with the process, in large pages; the next step need not map and zero it again.
_KEEPS_MEMORY: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "THP_MEM_ALLOC_ENABLE": "1",
}
_SMALL_VOCAB: Final = 12000
_NUM_WARM_UP_STEPS: Final = 3
# Between warm-up and decay, where the rate is the full one.
_DONE: Final = 0.5
_BYTES_A_KIB: Final = 1024
_GB: Final = 1e9


def sized_config(shape: str, length: int, num_pieces: int = 0) -> AlbertConfig:
    """Return a preset's sizes, with as many positions and pieces as are needed at least."""
    sizes = PRESETS[shape]
    vocab_size = max(_SMALL_VOCAB if shape == "small" else sizes.vocab_size, num_pieces)
    positions = max(length, sizes.max_positions)
    return replace(sizes, vocab_size=vocab_size, max_positions=positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class HfSettings:
    """The training settings of `transformers`.

    Attributes:
        num_rows: sequences of a step (`per_device_train_batch_size`).
        attention: its implementation.
        padding: every sequence to the full length, which gives one shape; or batches of like
            lengths, each padded to a multiple of 8 (`group_by_length`).
        keeps_memory: whether malloc keeps the memory that a step frees.
    """

    num_rows: int
    attention: Literal["sdpa", "eager"] = "sdpa"
    padding: Literal["full", "grouped"] = "full"
    keeps_memory: bool = False


class _TrainerCase(Protocol):
    """One model and its data, which both sides train on."""

    @property
    def length(self) -> int:
        """The most tokens of an example."""
        ...

    @property
    def lr(self) -> float:
        """The learning rate, at which neither side's loss diverges."""
        ...

    def build_ours(self, job: TrainerJob) -> Run:
        """Return this package's run, with AdamW as `transformers` has it."""
        ...

    def make_hf_model(self, attention: str) -> Any:
        """Return the model of `transformers`, at its first weights."""
        ...

    def hf_rows(self) -> Sequence[dict[str, Any]]:
        """Return the examples under the names of `transformers`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerJob:
    """The training of a process that takes turns.

    Attributes:
        title: of the case, the same for all contestants.
        hf: settings of `transformers`; None for this package.
        compiles: whether the model's pass is compiled.
        recipe: this package's recipe; None: trained as `transformers` trains.
    """

    title: str
    case: _TrainerCase
    hf: HfSettings | None
    device: str
    num_threads: int
    compiles: bool
    recipe: str | None = None

    @property
    def name(self) -> str:
        """The contestant and its settings."""
        compiled = "compiled" if self.compiles else "not compiled"
        if self.hf is None:
            recipe = "" if self.recipe is None else f", recipe {self.recipe}"
            return f"ours ({compiled}{recipe})"
        words = [f"{self.hf.num_rows} rows", self.hf.attention]
        words += ["grouped by length"] if self.hf.padding == "grouped" else []
        words += ["memory kept"] if self.hf.keeps_memory else []
        return f"transformers ({', '.join([*words, compiled])})"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the process."""
        kept = _KEEPS_MEMORY if self.hf is not None and self.hf.keeps_memory else {}
        return {"OMP_NUM_THREADS": str(self.num_threads), "TOKENIZERS_PARALLELISM": "false", **kept}


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrainerTurn:
    """The measurement of one turn.

    Attributes:
        seconds: of wall clock.
        cpu_seconds: of all threads together; where other programs run, too, the better measure.
        num_tokens: real tokens, padding not counted.
        peak_bytes: most memory until now: of the process, or on a GPU of its tensors.
    """

    seconds: float
    cpu_seconds: float
    num_steps: int
    num_tokens: int
    peak_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Real tokens a second of wall clock."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        """Real tokens a second that a processor worked."""
        return self.num_tokens / self.cpu_seconds


@dataclass(kw_only=True, slots=True)
class TrainerResult:
    """The measurements of a contestant.

    Attributes:
        warm_up_s: from the model's beginning to the end of its first steps, compilation included.
        turns: one a round; none if the contestant failed.
        failure: the error of a contestant that failed, such as one that lacked memory.
    """

    job: TrainerJob
    warm_up_s: float = 0.0
    turns: list[_TrainerTurn] = field(default_factory=list)
    failure: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Median over turns, of wall clock."""
        return statistics.median(turn.tokens_per_s for turn in self.turns)

    def record(self) -> dict[str, Any]:
        """All numbers."""
        turns = [asdict(turn) for turn in self.turns]
        record = {"name": self.job.name, "warm_up_s": self.warm_up_s, "turns": turns}
        return {**record, "failure": self.failure}


def trainer_table(
    results: Sequence[TrainerResult],
    rates: Sequence[tuple[str, Callable[[TrainerResult], str]]],
) -> str:
    """Return the table of a case, ours first, with ratios of turns of the same round.

    Other load varies little within a round. The row of a contestant that failed says so; the list
    below the table has its error.

    Args:
        rates: headings and cells of the columns before memory.
    """
    ours = results[0]

    def ratio(result: TrainerResult, rate: Callable[[_TrainerTurn], float]) -> str:
        if not ours.turns:
            return ""
        pairs = zip(ours.turns, result.turns, strict=True)
        return f"{statistics.median(rate(own) / rate(other) for own, other in pairs):.2f}x"

    def row(result: TrainerResult) -> list[str]:
        if result.failure:
            empty = [""] * (len(rates) + 3)
            return [result.job.name, failure_kind(result.failure), *empty]
        cells = [cell(result) for _, cell in rates]
        peak_bytes = max(turn.peak_bytes for turn in result.turns)
        cells += [f"{peak_bytes / _GB:.1f} GB", f"{result.warm_up_s:.0f} s"]
        if result is ours:
            return [f"**{result.job.name}**", *cells, "", ""]
        on_cpu = result.job.device == "cpu"
        by_cpu = ratio(result, lambda turn: turn.tokens_per_cpu_s) if on_cpu else ""
        return [result.job.name, *cells, ratio(result, lambda turn: turn.tokens_per_s), by_cpu]

    headings = [heading for heading, _ in rates]
    headings += ["memory", "warm-up", "ours is faster", "by CPU time"]
    rows = table(["", *headings], [row(result) for result in results])
    failures = [f"{result.job.name}: {result.failure}" for result in results if result.failure]
    return f"{rows}\n\n{bullets(failures)}" if failures else rows


def compare_trainers(
    cases: Sequence[Sequence[TrainerJob]],
    options: argparse.Namespace,
    machine: Sequence[str],
    markdown: Callable[[Sequence[TrainerResult]], str],
) -> str:
    """Measure the jobs of each case, and write `results.json` and `tables.md` as they come.

    Args:
        cases: ours first in each.
        options: those of `add_trainer_options`.
        markdown: makes the table of a case.

    Returns:
        The machine and all tables.
    """
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    cases_done: list[dict[str, Any]] = []
    text = bullets(machine)
    bar: tqdm[Any]
    with tqdm(total=sum(map(len, cases)) * (options.rounds + 1), disable=None, unit="turn") as bar:
        for jobs in cases:
            # On a GPU, whose memory they would share, they run one after the other.
            groups = [[job] for job in jobs] if jobs[0].device == "cuda" else [jobs]
            results: list[TrainerResult] = []
            earlier, text_before = list(cases_done), text
            for group in groups:  # written after each, so that an interruption keeps the others
                results += measure_in_turns(group, options, bar)
                text = f"{text_before}\n\n{markdown(results)}"
                records = [result.record() for result in results]
                cases_done = [*earlier, {"title": jobs[0].title, "results": records}]
                content = json.dumps({"machine": list(machine), "cases": cases_done}, indent=1)
                (output / "results.json").write_text(content, encoding="utf-8")
                (output / "tables.md").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    print(f"{output / 'results.json'} has every turn")
    return text


def measure_in_turns(
    jobs: Sequence[TrainerJob], options: argparse.Namespace, bar: tqdm[Any]
) -> list[TrainerResult]:
    """Measure jobs in turns of the options of `add_trainer_options`.

    A job that fails, as for lack of memory, leaves; the others go on.
    """
    with ExitStack() as stack:
        started: list[tuple[Worker, TrainerResult]] = []
        for job in jobs:
            words = f"{job.title}: {job.name}"
            bar.set_postfix_str(f"{words}, warming up")
            log = options.output / f"{re.sub('[^a-z0-9]+', '-', words.lower())}.log"
            process = stack.enter_context(
                Worker(job.name, __name__, job, environment=job.environment, log=log)
            )
            result = TrainerResult(job=job)
            with _leaving(result):
                result.warm_up_s = process.receive()
            started.append((process, result))
        for number in range(options.rounds + 1):
            for process, result in started:
                bar.set_postfix_str(f"{result.job.title}: {result.job.name}")
                with _leaving(result):
                    turn = None if result.failure else process.ask(options.turn)
                    if number and turn:  # the first one warms caches
                        result.turns.append(turn)
                bar.update()
    return [result for _, result in started]


@contextmanager
def _leaving(result: TrainerResult) -> Iterator[None]:
    """Note the failure of a job in its result; for `with`."""
    try:
        yield
    except BenchmarkError as error:
        result.failure = str(error)
        result.turns.clear()


def add_trainer_options(parser: argparse.ArgumentParser, output: str, rounds: int) -> None:
    """Add the options that both comparisons of training have."""
    add = parser.add_argument_group("how it is measured").add_argument
    shipped = REPOSITORY / "models" / "albert-small-en"
    add("--tokenizer", type=Path, default=shipped, help="folder (the shipped model's)")
    add("--output", type=Path, default=Path(output), help="(%(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="(yes)")
    add("--rounds", type=parse_count, default=rounds, help="turns that count (%(default)s)")
    add("--turn", type=parse_duration, metavar="8s", default=8.0, help="length of a turn (8s)")
    add("--threads", type=parse_count, default=torch.get_num_threads(), help="(%(default)s)")
    add_device(parser)


class Stopwatch:
    """Times turns of whole steps in a process that trains; to be called after each step.

    A turn in which something was compiled is begun again, so that neither side pays for a shape
    that it meets for the first time.

    Args:
        channel: gets the seconds of each turn, and sends what was done in it.
        count_tokens: real tokens trained on so far; called at the ends of turns alone, because
            it may wait for the device.
    """

    def __init__(
        self, channel: Channel, device: torch.device, count_tokens: Callable[[], int]
    ) -> None:
        self._channel, self._device, self._count_tokens = channel, device, count_tokens
        self._created = time.perf_counter()
        self._num_steps = 0
        self._turn_s: float | None = None
        self._num_graphs = 0

    def step_is_done(self) -> bool:
        """Return whether there is another step to be made."""
        self._num_steps += 1
        if self._turn_s is None:
            if self._num_steps < _NUM_WARM_UP_STEPS:
                return True
            self._synchronize()
            self._channel.send(time.perf_counter() - self._created)
            return self._begin_next()
        if _num_graphs() != self._num_graphs:
            self._begin()
        elif time.perf_counter() - self._began >= self._turn_s:
            self._channel.send(self._measure())
            return self._begin_next()
        return True

    def _begin_next(self) -> bool:
        self._turn_s = self._channel.receive()
        self._begin()
        return self._turn_s is not None

    def _begin(self) -> None:
        self._synchronize()
        self._num_graphs = _num_graphs()
        self._first_step, self._first_token = self._num_steps, self._count_tokens()
        self._began_cpu, self._began = time.process_time(), time.perf_counter()

    def _measure(self) -> _TrainerTurn:
        self._synchronize()
        return _TrainerTurn(
            seconds=time.perf_counter() - self._began,
            cpu_seconds=time.process_time() - self._began_cpu,
            num_steps=self._num_steps - self._first_step,
            num_tokens=self._count_tokens() - self._first_token,
            peak_bytes=self._peak_bytes(),
        )

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_A_KIB

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def serve(channel: Channel, job: TrainerJob) -> None:
    """Run as the process of a job: make steps until the last turn."""
    torch.set_num_threads(job.num_threads)
    if job.hf is not None:
        # Not imported in the process of ours.
        from benchmarks.harness.hf_trainer import train_hf_in_turns

        train_hf_in_turns(channel, job)
        return
    run = job.case.build_ours(job)
    run.objective.train()
    device = run.world.device
    if device.type == "cpu":
        keep_freed_memory()
    watch = Stopwatch(channel, device, lambda: run.num_tokens)
    while True:
        run.step(_DONE)
        if not watch.step_is_done():
            return


def _num_graphs() -> int:
    """Return the graphs that torch.compile has made so far in this process."""
    return int(counters["stats"]["unique_graphs"])
