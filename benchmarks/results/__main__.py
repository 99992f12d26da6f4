"""Finetune a checkpoint on standard tasks, several seeds each, and measure it on held-out files.

Prints tables with the figures of published ALBERT models; `--write` puts them into
docs/results.md. The same command resumes what was stopped, and repeats no finished run; tasks
without a finished run are not in the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.service import REPOSITORY
from benchmarks.harness.tables import write_between
from benchmarks.results.page import render
from benchmarks.results.runs import Setup, read_results, run_task
from benchmarks.results.tasks import TASKS, check_data
from training.errors import report_errors
from training.run.options import add_device, parse_count
from training.system.command_line import make_parser

_DOCS: Final = REPOSITORY / "docs" / "results.md"
_BEGIN: Final = "<!-- written by python -m benchmarks.results: begin -->"
_END: Final = "<!-- written by python -m benchmarks.results: end -->"
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.results --data data/ --output runs/results --write
  python -m benchmarks.results --data data/ --output runs/base --initialize-from \
      albert/albert-base-v2 --tasks cola rte --seeds 5
  python -m benchmarks.results --data data/ --output runs/results --tasks --write
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    setup = Setup(
        initialize_from=options.initialize_from,
        data=options.data,
        output=options.output,
        num_seeds=options.seeds,
        num_steps=options.steps,
        device=str(options.device),
    )
    check_data(setup.data, {name: TASKS[name] for name in options.tasks})
    status = 0
    for name in options.tasks:
        print(f"task {name}", flush=True)
        status = run_task(setup, name, TASKS[name])
        if status:
            break
    _report(setup, options.write)
    return status


def _report(setup: Setup, page: Path | None) -> None:
    """Print the tables of all finished runs in the output folder, and write them if asked to."""
    results = {
        name: read_results(setup, name, task)
        for name, task in TASKS.items()
        if (setup.output / name).is_dir()
    }
    if not any(task.has_row for task in results.values()):
        print("no run is finished")
        return
    machine = list(describe_machine(torch.get_num_threads()))
    tables = render(results, Path(setup.initialize_from).name, machine)
    print(tables)
    if page is not None:
        write_between(page, _BEGIN, _END, tables)
        print(f"written to {page}")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.results", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="with a folder for each task, such as sst2/")
    add("--output", type=Path, default=Path("runs/results"), help="takes the runs (%(default)s)")
    add(
        "--initialize-from",
        default=str(REPOSITORY / "models" / "albert-small-en"),
        metavar="CHECKPOINT",
        help="a folder, or a model of the Hugging Face Hub (the shipped model)",
    )
    add(
        "--tasks",
        nargs="*",
        choices=list(TASKS),
        default=list(TASKS),
        help="in this order; none: only the tables (all, the smallest first)",
    )
    add("--seeds", type=parse_count, default=3, help="runs of each task (%(default)s)")
    add("--steps", type=parse_count, help="of each run, in place of the table's")
    add(
        "--write",
        nargs="?",
        type=Path,
        const=_DOCS,
        metavar="PAGE",
        help="put the tables into a page between its marks (docs/results.md)",
    )
    add_device(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
