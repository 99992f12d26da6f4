"""The runs of the tasks: each seed is finetuned and measured in a folder of its own.

A run that was stopped is resumed, and a measured one is not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from training.finetuning.seeds import SeedRun, folder_of

from albert_serve.files import write_atomically
from benchmarks.harness.errors import BenchmarkError
from benchmarks.results.tasks import ResultTask
from training import evaluate, finetune
from training.loop.provenance import read_stages

_FIGURES: Final = "figures.json"
_SEEDS: Final = "seeds.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The settings that the runs of all tasks have in common.

    Attributes:
        initialize_from: a checkpoint, or a model of the Hub.
        data: with a folder for each task.
        output: takes a folder for each task.
        num_seeds: runs of a task, from seed 0 on.
        num_steps: of each run; None for the table's.
        device: as `--device` names it.
    """

    initialize_from: str
    data: Path
    output: Path
    num_seeds: int
    num_steps: int | None
    device: str

    def training(self, task: ResultTask) -> list[str]:
        """Return the options of a task's training, without those of its seeds and output."""
        steps = str(self.num_steps)
        end = task.end if self.num_steps is None else ("--steps", steps, "--validate-every", steps)
        start = ("--initialize-from", self.initialize_from, "--device", self.device)
        return [*start, *task.training(self.data), *end]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedResult:
    """The figures of one run.

    Attributes:
        figures: of each measure of the task, by its title.
        stage: of the training, as `training.json` has it: settings, steps, tokens, seconds.
    """

    figures: Mapping[str, Mapping[str, Any]]
    stage: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResults:
    """The figures of the finished runs of a task.

    Attributes:
        by_seed: of the runs that did not collapse; if all did, of those that were not replaced and
            did not diverge, of which there may be none.
        num_collapsed: runs that collapsed or diverged, with those that were replaced.
        all_collapsed: whether no other run has ended.
    """

    by_seed: Mapping[int, SeedResult]
    num_collapsed: int = 0
    all_collapsed: bool = False

    @property
    def has_row(self) -> bool:
        """Whether a run has ended whose figures, or whose collapse, can be shown."""
        return bool(self.by_seed) or self.all_collapsed


def read_results(setup: Setup, name: str, task: ResultTask) -> TaskResults:
    """Return the results of the finished runs of a task.

    Raises:
        BenchmarkError: a file is damaged, or was made with other options.
    """
    folder = setup.output / name
    runs = _read_runs(folder, setup, task)
    results = {seed: _read_result(folder_of(folder, seed), setup, task) for seed in _shown(runs)}
    return TaskResults(
        by_seed={seed: result for seed, result in results.items() if result is not None},
        num_collapsed=sum(run.has_collapsed for run in runs),
        all_collapsed=_all_collapsed(runs),
    )


def run_task(setup: Setup, name: str, task: ResultTask) -> int:
    """Finetune and measure the runs of a task that are not finished.

    Returns the exit status of the first command that failed or was stopped, or 0.

    Raises:
        BenchmarkError: as `read_results`.
    """
    folder = setup.output / name
    runs = _read_runs(folder, setup, task)
    results = read_results(setup, name, task).by_seed
    if _have_ended(runs, setup.num_seeds) and set(_shown(runs)) <= results.keys():
        return 0
    options = setup.training(task)
    if task.is_validated:
        status = finetune.main(
            [*options, "--seeds", str(setup.num_seeds), "--output", str(folder)],
        )
        runs = _read_runs(folder, setup, task)
        # That all have collapsed is an error, and a result.
        if status and not (_have_ended(runs, setup.num_seeds) and _all_collapsed(runs)):
            return status
    for seed in _shown(runs):
        run = folder_of(folder, seed)
        if _read_result(run, setup, task) is not None:
            continue
        if not task.is_validated and (
            status := finetune.main([*options, "--seed", str(seed), "--output", str(run)])
        ):
            return status
        if status := _measure(run, setup, task):
            return status
    return 0


def _read_runs(folder: Path, setup: Setup, task: ResultTask) -> list[SeedRun]:
    """Return the runs of a task that have ended; without validation, those that are asked for."""
    if not task.is_validated:
        return [
            SeedRun(seed=seed, value=None, step=None, has_collapsed=False)
            for seed in range(setup.num_seeds)
        ]
    try:
        return [SeedRun(**run) for run in json.loads((folder / _SEEDS).read_bytes())["runs"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{folder / _SEEDS}: {error!r}; delete {folder}") from error


def _all_collapsed(runs: Sequence[SeedRun]) -> bool:
    return bool(runs) and all(run.has_collapsed for run in runs)


def _have_ended(runs: Sequence[SeedRun], num_seeds: int) -> bool:
    """Whether so many seeds have ended, with a run in place of each that collapsed."""
    replaced = {run.in_place_of for run in runs}
    ended = [run for run in runs if not run.has_collapsed or run.seed in replaced]
    return sum(run.in_place_of is None for run in ended) >= num_seeds


def _shown(runs: Sequence[SeedRun]) -> list[int]:
    """Return the seeds that are measured: those that count, or else all that were not replaced."""
    if not _all_collapsed(runs):
        return [run.seed for run in runs if not run.has_collapsed]
    replaced = {run.in_place_of for run in runs}
    return [run.seed for run in runs if run.seed not in replaced and not run.has_diverged]


def _measure(run: Path, setup: Setup, task: ResultTask) -> int:
    """Evaluate a run's newest checkpoint, which no validation has selected."""
    checkpoint = run / "checkpoint"
    figures: dict[str, Any] = {}
    for measure in task.measures:
        file = run / "evaluation.json"
        options = [*task.evaluation(measure, setup.data), "--device", setup.device]
        status = evaluate.main([str(checkpoint), *options, "--output", str(file)])
        if status:
            return status
        figures[measure.title] = json.loads(file.read_bytes())
    record = {
        "options": setup.training(task),
        "figures": figures,
        "stage": read_stages(checkpoint)[-1],
    }
    write_atomically(run / _FIGURES, (json.dumps(record, indent=2) + "\n").encode())
    return 0


def _read_result(run: Path, setup: Setup, task: ResultTask) -> SeedResult | None:
    file = run / _FIGURES
    try:
        record = json.loads(file.read_bytes())
        result = SeedResult(figures=record["figures"], stage=record["stage"])
        options = record["options"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{file}: {error!r}; delete it to measure again") from error
    if options != setup.training(task):
        raise BenchmarkError(
            f"{run} was trained with {' '.join(options)}, not {' '.join(setup.training(task))}; "
            "give another --output"
        )
    return result
