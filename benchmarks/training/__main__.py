"""Speed of training with this package, compared with the `Trainer` of `transformers`.

Both train the same model on the same examples with AdamW, in bf16 (fp32 on a CPU without bf16), and
take turns. Pretraining is compiled; finetuning is not. Prints the number of real tokens per second,
the memory, and how many times faster this package is, as medians over rounds. On a CPU,
`transformers` runs with its default and with its fastest settings. Writes `results.json` and
`tables.md` into the output folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

from albert_serve.config import PRESETS
from albert_serve.terminal import make_parser
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.page import (
    bullets,
    describe_machine,
    median_of,
    ratios,
    table,
    write_results,
)
from benchmarks.harness.process import REPOSITORY, BenchmarkError, Worker
from benchmarks.harness.texts import WIKI
from benchmarks.training.case import PretrainingCase, make_examples, sized_config
from benchmarks.training.finetuning import FinetuningCase, make_case
from benchmarks.training.sides import HfSettings, TrainerJob, TrainerTurn, serve
from training.data.preparation import prepare
from training.errors import report_errors
from training.options.config import add_device
from training.options.values import parse_count, parse_duration

# Number of tokens per step. Larger steps were not faster.
_BATCH_TOKENS: Final = {"cpu": 4096, "cuda": 65536}
# Batch size of `transformers` relative to ours, for models that it trains faster with another
# batch size than ours.
_HF_ROWS: Final = {"small": 2}
_BATCHES_OF_EXAMPLES: Final = 32
_GB: Final = 1e9
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.training
  python -m benchmarks.training --shapes base --length 512 --corpus wiki/*.jsonl.xz
  python -m benchmarks.training --shapes --finetune banking77/train.csv
"""


@dataclass(kw_only=True, slots=True)
class TrainerResult:
    """The results of a side.

    Attributes:
        warm_up_s: seconds from the start to the end of the first steps, including compilation.
        turns: one turn per round, or empty if the side failed.
        failure: error message if the side failed.
    """

    name: str
    warm_up_s: float = 0.0
    turns: list[TrainerTurn] = field(default_factory=list)
    failure: str = ""

    @property
    def rates(self) -> list[float]:
        """Number of tokens per second, by round."""
        return [turn.num_tokens / turn.seconds for turn in self.turns]

    @property
    def cpu_rates(self) -> list[float]:
        """Number of tokens per second of CPU time, by round."""
        return [turn.num_tokens / turn.cpu_seconds for turn in self.turns]

    def cells(self, ours: TrainerResult) -> list[str]:
        """Return the side's row of a table."""
        rate = statistics.median(self.rates)
        peak_bytes = max(turn.peak_bytes for turn in self.turns)
        cells = [f"{rate:,.0f}", f"{peak_bytes / _GB:.1f} GB", f"{self.warm_up_s:.0f} s"]
        if self is ours or not ours.turns:
            return [f"**{self.name}**", *cells, "", ""]
        by_clock = median_of(ratios(ours.rates, self.rates))
        by_cpu = median_of(ratios(ours.cpu_rates, self.cpu_rates))
        return [self.name, *cells, by_clock, by_cpu]


@dataclass(kw_only=True, slots=True)
class TrainingReport:
    """The results of each case by its title, ours first."""

    machine: Sequence[str]
    cases: dict[str, list[TrainerResult]] = field(default_factory=dict)

    def markdown(self) -> str:
        """Return a table for each case."""
        sections = [bullets(self.machine)]
        for title, results in self.cases.items():
            rows = [result.cells(results[0]) for result in results if result.turns]
            headings = ["", "tokens/s", "memory", "warm-up", "ours, times as fast", "by CPU time"]
            failures = [f"{result.name}: {result.failure}" for result in results if result.failure]
            sections += [f"{title}:", table(headings, rows), *failures]
        return "\n\n".join(sections) + "\n"


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    report = TrainingReport(machine=list(describe_machine(options.threads)))
    for title, jobs in _cases(options):
        report.cases[title] = []
        # Jobs on a GPU would share its memory, so they run one after another.
        for group in [[job] for job in jobs] if options.device.type == "cuda" else [jobs]:
            report.cases[title] += _measure_in_turns(group, options)
            # The results are written after each case, so that an interruption loses only one case.
            write_results(options.output, report, report.markdown())
    print(report.markdown())
    return 0


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, list[TrainerJob]]]:
    """Yield the title and the jobs of each case."""
    for shape in options.shapes:
        case = _pretraining_case(shape, options)
        plain = HfSettings(num_rows=case.num_rows * _HF_ROWS.get(shape, 1))
        jobs = _jobs(case, plain, options, compiles=options.compile)
        yield f"{shape}, {case.num_rows} x {case.length} tokens", jobs
    if options.finetune is not None:
        texts = make_case(options.finetune, length=options.length)
        # By default, neither side compiles a finetuning run.
        jobs = _jobs(texts, HfSettings(num_rows=texts.num_rows), options, compiles=False)
        yield f"finetuning the default model, {texts.num_rows} texts per step", jobs


def _pretraining_case(shape: str, options: argparse.Namespace) -> PretrainingCase:
    tokens = options.batch_tokens or _BATCH_TOKENS[options.device.type]
    num_rows = max(1, tokens // options.length)
    tokenizer, folder = options.tokenizer.resolve(), (options.output / "shards").resolve()
    shards = prepare(options.corpus, tokenizer / "tokenizer.json", folder)
    num_pieces = AlbertTokenizer.from_file(tokenizer / "tokenizer.json").vocab_size
    num_examples = _BATCHES_OF_EXAMPLES * num_rows
    return PretrainingCase(
        config=sized_config(shape, options.length, num_pieces),
        length=options.length,
        num_rows=num_rows,
        shards=folder,
        examples=make_examples(shards, tokenizer, length=options.length, num_examples=num_examples),
        tokenizer=tokenizer,
    )


def _jobs(
    case: PretrainingCase | FinetuningCase,
    plain: HfSettings,
    options: argparse.Namespace,
    *,
    compiles: bool,
) -> list[TrainerJob]:
    """Return the jobs of a case, ours first.

    Args:
        plain: settings of `transformers`, to which its fastest settings are added on a CPU.
    """
    ours = TrainerJob(
        case=case,
        hf=None,
        device=options.device,
        num_threads=options.threads,
        compiles=compiles,
    )
    # Rows of a fixed length are padded to it, whatever the other rows' lengths.
    groups_lengths = case.padded_length is None
    fastest = replace(plain, attention="eager", keeps_memory=True, groups_lengths=groups_lengths)
    peers = [plain] if options.device.type == "cuda" else [plain, fastest]
    return [ours, *(replace(ours, hf=settings) for settings in peers)]


def _measure_in_turns(
    jobs: Sequence[TrainerJob], options: argparse.Namespace
) -> list[TrainerResult]:
    """Measure jobs in turns. A job that fails is skipped from then on."""
    with ExitStack() as stack:
        started: list[tuple[Worker, TrainerResult]] = []
        for number, job in enumerate(jobs):
            log = options.output / f"process-{number}.log"
            worker = Worker(job.name, serve, job, log=log, environment=job.environment)
            process, result = stack.enter_context(worker), TrainerResult(name=job.name)
            try:
                result.warm_up_s = process.receive()
            except BenchmarkError as error:
                result.failure = str(error)
            started.append((process, result))
            print(f"{job.name}: warm-up of {result.warm_up_s:.0f} s", file=sys.stderr)
        for number in range(options.rounds + 1):
            for process, result in started:
                if result.failure:
                    continue
                try:
                    turn = process.ask(options.turn)
                except BenchmarkError as error:
                    result.failure = str(error)
                    result.turns.clear()
                else:
                    result.turns += [turn] if number else []  # the first turn warms caches
    return [result for _, result in started]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.training", __doc__, _EXAMPLES)
    add = parser.add_argument
    shapes = ["small", "base"]
    add(
        "--shapes",
        nargs="*",
        choices=list(PRESETS),
        default=shapes,
        help="sizes of the models to pretrain (default: small base)",
    )
    add(
        "--finetune",
        type=Path,
        metavar="FILE",
        help="labelled texts: also finetune the default model on them",
    )
    add("--length", type=parse_count, default=128, help="tokens per example (default: %(default)s)")
    add("--batch-tokens", type=parse_count, help="tokens per step (default: 4096; GPU: 65536)")
    add("--corpus", nargs="+", type=Path, default=[WIKI], help="text (default: a few articles)")
    shipped = REPOSITORY / "models" / "albert-small-en"
    add("--tokenizer", type=Path, default=shipped, help="folder (default: the default model)")
    add(
        "--output",
        type=Path,
        default=Path("runs/bench-training"),
        help="folder of the results (default: %(default)s)",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile both sides (default: yes)",
    )
    add("--rounds", type=parse_count, default=3, help="measured turns (default: %(default)s)")
    add(
        "--turn",
        type=parse_duration,
        metavar="8s",
        default=8.0,
        help="duration of a turn (default: 8s)",
    )
    add(
        "--threads",
        type=parse_count,
        default=torch.get_num_threads(),
        help="threads (default: %(default)s)",
    )
    add_device(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
