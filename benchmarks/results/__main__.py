"""Finetune a checkpoint on standard tasks, several seeds each, and measure it on held-out files.

Prints tables with the figures of published models; `--write` puts them into docs/measurements.md.
The same command resumes what was stopped, and repeats no finished run; tasks without a finished run
are not in the tables. Processes with different --tasks may share an --output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from albert_serve.bundle.manifest import WEIGHTS_FILE
from albert_serve.files import sha256_of, write_atomically
from benchmarks.harness.page import describe_machine, write_between
from benchmarks.harness.process import REPOSITORY, BenchmarkError
from benchmarks.results.page import SeedResult, render
from benchmarks.results.tasks import RESULT_TASKS, ResultTask
from recipes.albert_small_en import unanswerable
from training.commands import evaluate, finetune
from training.errors import report_errors
from training.model.provenance import read_stages
from training.options.device import add_device
from training.options.values import parse_count
from training.system.command_line import make_parser

_PAGE: Final = REPOSITORY / "docs" / "measurements.md"
_BEGIN: Final = "<!-- written by python -m benchmarks.results: begin -->"
_END: Final = "<!-- written by python -m benchmarks.results: end -->"
_FIGURES_FILE: Final = "figures.json"
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.results --data data/ --output runs/results --write
  python -m benchmarks.results --data data/ --output runs/base --initialize-from \
      albert/albert-base-v2 --tasks cola rte --seeds 5
  python -m benchmarks.results --data data/ --output runs/results --tasks --write
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ResultRuns:
    """The runs of all tasks: each seed is finetuned and measured in a folder of its own."""

    initialize_from: str
    data: Path
    output: Path
    num_seeds: int
    num_steps: int | None
    device: str

    def make(self, name: str, task: ResultTask) -> int:
        """Finetune and measure the runs of a task that are not finished.

        Returns the exit status of the first command that failed or was stopped, or 0.

        Raises:
            BenchmarkError: a finished run is damaged, or was made with other options.
        """
        if status := self._make_unanswerable(task):
            return status
        for seed in range(self.num_seeds):
            run = self.output / name / f"seed-{seed}"
            if self._read(run, task) is not None:
                continue
            words = [*self._training(task), "--seed", str(seed), "--output", str(run)]
            if status := finetune.main(words) or self._measure(run, task):
                return status
        return 0

    def finished(self, name: str, task: ResultTask) -> list[SeedResult]:
        """Return the results of the finished runs of a task; raises as `make`."""
        runs = sorted((self.output / name).glob("seed-*"))
        results = [self._read(run, task) for run in runs]
        return [result for result in results if result is not None]

    @property
    def _unanswerable(self) -> Path:
        """Questions without an answer."""
        return self.output / "unanswerable.json.xz"

    def _make_unanswerable(self, task: ResultTask) -> int:
        """Make questions without an answer of those that a task is trained on, if any."""
        questions = task.questions(self.data)
        if not questions or self._unanswerable.exists():
            return 0
        self.output.mkdir(parents=True, exist_ok=True)
        return unanswerable.main([*questions, str(self._unanswerable)])

    def _training(self, task: ResultTask) -> list[str]:
        """Return the options of a task's training, except seed and output."""
        steps = str(self.num_steps)
        end = () if self.num_steps is None else ("--steps", steps, "--validate-every", steps)
        start = ("--initialize-from", self.initialize_from, "--device", self.device)
        return [*start, *task.training(self.data, self._unanswerable), *end]

    def _measure(self, run: Path, task: ResultTask) -> int:
        """Evaluate a run's newest checkpoint, which no validation has selected."""
        checkpoint, file = run / "checkpoint", run / "evaluation.json"
        figures: dict[str, Any] = {}
        for measure in task.measures:
            options = [*task.evaluation(measure, self.data), "--device", self.device]
            if status := evaluate.main([str(checkpoint), *options, "--output", str(file)]):
                return status
            figures[measure.title] = json.loads(file.read_bytes())
        record = {
            "options": self._training(task),
            "figures": figures,
            "stage": read_stages(checkpoint)[-1],
        }
        write_atomically(run / _FIGURES_FILE, (json.dumps(record, indent=2) + "\n").encode())
        return 0

    def _read(self, run: Path, task: ResultTask) -> SeedResult | None:
        file, options = run / _FIGURES_FILE, self._training(task)
        try:
            record = json.loads(file.read_bytes())
            result = SeedResult(figures=record["figures"], stage=record["stage"])
            recorded = record["options"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"{file}: {error!r}; delete it to measure again") from error
        if recorded != options:
            raise BenchmarkError(
                f"{run} was trained with {' '.join(recorded)}, not {' '.join(options)}; "
                "give another --output"
            )
        return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    runs = _ResultRuns(
        initialize_from=options.initialize_from,
        data=options.data,
        output=options.output,
        num_seeds=options.seeds,
        num_steps=options.steps,
        device=str(options.device),
    )
    for name in options.tasks:
        task = RESULT_TASKS[name]
        task.training(runs.data, runs.output)  # it says which files are missing
        for measure in task.measures:
            task.evaluation(measure, runs.data)
    status = 0
    for name in options.tasks:
        print(f"task {name}", flush=True)
        status = runs.make(name, RESULT_TASKS[name])
        if status:
            break
    _report(runs, options.write)
    return status


def _report(runs: _ResultRuns, page: Path | None) -> None:
    """Print the tables of all finished runs in the output folder, and write them if asked to."""
    found = {
        name: runs.finished(name, task)
        for name, task in RESULT_TASKS.items()
        if (runs.output / name).is_dir()
    }
    results = {name: each for name, each in found.items() if each}
    if not results:
        print("no run is finished")
        return
    machine = list(describe_machine(torch.get_num_threads()))
    tables = render(results, checkpoint_name(runs.initialize_from), machine)
    print(tables)
    if page is not None:
        write_between(page, _BEGIN, _END, tables)
        print(f"written to {page}")


def checkpoint_name(reference: str) -> str:
    """Return a checkpoint's name, of a folder with the hash of its weights."""
    weights = Path(reference) / WEIGHTS_FILE
    if not weights.is_file():
        return f"`{reference}`"
    return f"`{weights.parent.name}` ({WEIGHTS_FILE}, SHA-256 `{sha256_of(weights)[:12]}`)"


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.results", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="with a folder for each task, such as sst2/")
    add("--output", type=Path, default=Path("runs/results"), help="takes the runs (%(default)s)")
    shipped = str(REPOSITORY / "models" / "albert-small-en")
    start = "a folder, or a model of the Hugging Face Hub (the shipped model)"
    add("--initialize-from", default=shipped, metavar="CHECKPOINT", help=start)
    names = list(RESULT_TASKS)
    tasks = "in this order; none: only the tables (all, the smallest first)"
    add("--tasks", nargs="*", choices=names, default=names, help=tasks)
    add("--seeds", type=parse_count, default=3, help="runs of each task (%(default)s)")
    add("--steps", type=parse_count, help="of each run, in place of the table's")
    write = "put the tables into a page between its marks (docs/measurements.md)"
    add("--write", nargs="?", type=Path, const=_PAGE, metavar="PAGE", help=write)
    add_device(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
