"""Speed of finetuning with this package, against the `Trainer` of `transformers`.

Trains the same model on the same tokenised examples, with the same number of examples a step, in
bf16 (fp32 on a CPU without it) and with AdamW, in turns, and prints examples a second, memory and
how many times faster ours is, as the median over rounds. Padding (batches of like lengths, or all
to the full length) and compilation of `transformers` are those that are fastest in a turn of each.
Writes `results.json` into the output folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import torch
from tqdm import tqdm

from albert_serve.config import PRESETS
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.finetuning.data import write_examples
from benchmarks.finetuning.jobs import Case, FinetuningTask, Job
from benchmarks.finetuning.report import Report
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.service import REPOSITORY
from benchmarks.harness.tables import bullets, write_between
from benchmarks.pretraining.contest import Contest
from benchmarks.pretraining.jobs import HfSettings
from training.errors import report_errors
from training.run.options import add_device, parse_count, parse_duration
from training.system.command_line import make_parser

_DOCS: Final = REPOSITORY / "docs" / "benchmarks.md"
_BEGIN: Final = "<!-- written by make bench-finetune: begin -->"
_END: Final = "<!-- written by make bench-finetune: end -->"
_TESTS: Final = REPOSITORY / "tests" / "data"
_LENGTHS: Final[dict[FinetuningTask, int]] = {
    "text-classification": 128,
    "question-answering": 384,
}
_BATCH_SIZES: Final[dict[FinetuningTask, int]] = {
    "text-classification": 32,
    "question-answering": 16,
}
_BATCHES_OF_EXAMPLES: Final = 64
_SMALL_VOCAB: Final = 12000
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.finetune
  python -m benchmarks.finetune --texts sst2/train.tsv --questions squad/train-v1.1.json --write
  python -m benchmarks.finetune --tasks text-classification --shapes base --rounds 3
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    options.output.mkdir(parents=True, exist_ok=True)
    machine = list(describe_machine(options.threads))
    cases = [(task, shape) for task in options.tasks for shape in options.shapes]
    reports: list[Report] = []
    bar: tqdm[Any]
    with tqdm(total=len(cases) * _num_units(options), disable=None, unit="turn") as bar:
        contest = Contest(rounds=options.rounds, turn_s=options.turn, logs=options.output, bar=bar)
        for task, shape in cases:
            reports.append(_measure(_case(task, shape, options), options, contest))
            _save(reports, machine, options.output)
            with bar.external_write_mode():
                print(f"\n{reports[-1].markdown()}")
    text = "\n".join([bullets(machine), "", *(report.markdown() for report in reports)])
    if options.write is not None:
        write_between(options.write, _BEGIN, _END, text)
    print(f"{options.output / 'results.json'} has every turn")
    return 0


def _num_units(options: argparse.Namespace) -> int:
    """Return the turns and starts of children of a case, for the progress bar."""
    num_candidates = len(_candidates(1, options))
    num_units: int = 3 * num_candidates + (3 + options.compile) * (options.rounds + 2)
    return num_units


def _case(task: FinetuningTask, shape: str, options: argparse.Namespace) -> Case:
    return Case(
        task=task,
        shape=shape,
        vocab_size=_SMALL_VOCAB if shape == "small" else PRESETS[shape].vocab_size,
        length=_LENGTHS[task],
        batch_size=options.batch_size or _BATCH_SIZES[task],
    )


def _candidates(batch_size: int, options: argparse.Namespace) -> list[tuple[HfSettings, bool]]:
    """Return settings of `transformers`, each compiled or not, of which the fastest is taken."""
    grouped = HfSettings(num_rows=batch_size, padding="grouped", keeps_memory=True)
    plain = [(grouped, False), (replace(grouped, attention="eager"), False)]
    if not options.compile:
        return plain
    full = replace(grouped, padding="full")
    return [*plain, (grouped, True), (full, True)]


def _measure(case: Case, options: argparse.Namespace, contest: Contest) -> Report:
    files = options.texts if case.task == "text-classification" else options.questions
    examples = options.output / f"{case.task}.json"
    mean_tokens = write_examples(
        case.task,
        files,
        AlbertTokenizer.from_file(options.tokenizer / "tokenizer.json"),
        examples,
        length=case.length,
        num_examples=_BATCHES_OF_EXAMPLES * case.batch_size,
    )
    ours = Job(
        case=case,
        hf=None,
        examples=examples.resolve(),
        device=options.device.type,
        num_threads=options.threads,
        compiles=options.compile,
    )
    candidates = [
        replace(ours, hf=settings, compiles=compiles)
        for settings, compiles in _candidates(case.batch_size, options)
    ]
    best = contest.fastest(candidates)
    assert isinstance(best, Job)
    assert best.hf is not None
    jobs = [ours, best, replace(best, hf=replace(best.hf, keeps_memory=False))]
    if options.compile:
        jobs.insert(1, replace(ours, compiles=False))
    return Report(case=case, mean_tokens=mean_tokens, results=contest.measure(jobs))


def _save(reports: Sequence[Report], machine: Sequence[str], folder: Path) -> None:
    content = {"machine": machine, "cases": [report.to_dict() for report in reports]}
    (folder / "results.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.finetune", __doc__, _EXAMPLES)
    add = parser.add_argument
    tasks = get_args(FinetuningTask)
    add("--tasks", nargs="+", choices=tasks, default=list(tasks), help="(both)")
    add(
        "--shapes",
        nargs="+",
        choices=list(PRESETS),
        default=["small", "base"],
        help="presets, with random weights (small base)",
    )
    add(
        "--texts",
        nargs="+",
        type=Path,
        metavar="FILE",
        default=[_TESTS / "banking77" / "train.csv"],
        help="labelled texts, such as SST-2's (questions of bank customers)",
    )
    add(
        "--questions",
        nargs="+",
        type=Path,
        metavar="FILE",
        default=[_TESTS / "squad.json"],
        help="SQuAD files (an excerpt)",
    )
    add(
        "--tokenizer",
        type=Path,
        default=REPOSITORY / "models" / "albert-small-en",
        help="folder with tokenizer.json (the shipped model's)",
    )
    add("--batch-size", type=parse_count, help="examples a step (32 texts, 16 questions)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="(yes)")
    add("--output", type=Path, default=Path("runs/benchmark-finetune"), help="(%(default)s)")
    add("--rounds", type=parse_count, default=3, help="turns that count (%(default)s)")
    add("--turn", type=parse_duration, default=8.0, help="length of a turn (8s)")
    add("--threads", type=parse_count, default=torch.get_num_threads(), help="(%(default)s)")
    add(
        "--write",
        nargs="?",
        type=Path,
        const=_DOCS,
        metavar="PAGE",
        help="put the tables into a page between its marks (docs/benchmarks.md)",
    )
    add_device(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
