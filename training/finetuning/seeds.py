"""Several runs of a finetuning with different seeds, one after the other, and the best of them.

Each is the run that `--seed` would be, in a folder of its own, so that the whole is resumed by the
same command. `seeds.json` has the figures, and `best` links to the best run's best checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from albert_serve.files import partial_path, write_atomically
from training.evaluation.metrics import LOWEST
from training.loop.progress import DivergedError, RunError
from training.loop.selection import Selection
from training.system.precision import PrecisionName

_RESULTS: Final = "seeds.json"
_BEST: Final = "best"


class Trained(NamedTuple):
    """A run that has ended.

    Attributes:
        status: exit status; not 0 if a signal stopped the run, or it has diverged.
        selection: its best validation; None without validation.
        precision: of matrix products.
        divergence: the error of a run that has diverged.
        signal: that came while the run trained, also if the run is done.
    """

    status: int
    selection: Selection | None
    precision: PrecisionName
    divergence: DivergedError | None = None
    signal: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedRun:
    """The result of one seed.

    Attributes:
        value: the best figure; None if no validation had one, or the run has diverged.
        step: of the best validation.
        has_collapsed: whether the figure is not better than that of one answer for all texts, or
            there is none.
        in_place_of: the seed of the collapsed or diverged run that it replaces.
        has_diverged: whether the gradient stayed not finite.
    """

    seed: int
    value: float | None
    step: int | None
    has_collapsed: bool
    in_place_of: int | None = None
    has_diverged: bool = False


def seeds_of(options: argparse.Namespace) -> list[int]:
    """Return the seeds of `--seeds`: so many from --seed on, or those that are listed.

    Raises:
        RunError: they contradict other options.
    """
    asked: list[int] = options.seeds
    if not any(each.validation for each in (options, *options.heads)):
        raise RunError(
            "--seeds compares runs by their validation; give --validation, or --task with its data"
        )
    if len(set(asked)) < len(asked):
        raise RunError(f"--seeds {' '.join(map(str, asked))}: give each seed once")
    if len(asked) > 1:
        if options.seed:
            raise RunError(f"--seed {options.seed} is the first of a number of --seeds; give one")
        return asked
    if not asked[0]:
        raise RunError("--seeds 0: give a number of runs, or two seeds or more")
    return list(range(options.seed, options.seed + asked[0]))


def check_folder(options: argparse.Namespace) -> None:
    """Check that a folder of one run is not given to several, nor the reverse.

    Raises:
        RunError: it is.
    """
    folder: Path = options.output
    if options.seeds is not None and (folder / "run.json").is_file():
        raise RunError(f"{folder} holds a run without --seeds; give another --output")
    if options.seeds is None and any(folder.glob("seed-*/run.json")):
        raise RunError(f"{folder} holds runs of several seeds; give --seeds, or another --output")


def train_seeds(
    options: argparse.Namespace,
    train: Callable[[argparse.Namespace], Trained],
    *,
    is_main: bool = True,
) -> int:
    """Train a run of each seed, and report them; return the exit status.

    A run that has collapsed or diverged is replaced by one of another seed, once.

    Args:
        options: with `seeds`, `seed` and `output`.
        train: trains one run, or resumes it.
        is_main: whether this process writes the figures; several train the same runs.

    Raises:
        RunError: as `seeds_of`, and as `train`; in the main process, all runs have collapsed.
    """
    seeds = seeds_of(options)
    fresh = max(seeds) + 1
    runs: list[SeedRun] = []
    waiting: list[tuple[int, int | None]] = [(seed, None) for seed in seeds]
    precision = options.precision
    while waiting:
        seed, in_place_of = waiting.pop(0)
        own = {"seed": seed, "output": folder_of(options.output, seed), "precision": precision}
        trained = train(argparse.Namespace(**{**vars(options), **own}))
        if trained.status and trained.divergence is None:
            return trained.status
        precision = trained.precision  # the same for all, also where it was measured
        selection = trained.selection
        assert selection is not None
        run = _result(seed, in_place_of, trained, selection)
        runs.append(run)
        if trained.divergence is not None:
            print(f"seed {seed} has diverged: {trained.divergence}")
        if run.has_collapsed and in_place_of is None:
            print(f"seed {seed} has {_fate(run)}; seed {fresh} replaces it")
            waiting.insert(0, (fresh, seed))
            fresh += 1
        if is_main:
            _write(options.output, runs, selection)
        if trained.signal is not None and waiting:
            print(f"stopped after seed {seed}; the same command goes on with the next")
            return 128 + trained.signal
    if is_main:
        _report(options.output, runs)
    return 0 if any(not run.has_collapsed for run in runs) else 1


def folder_of(output: Path, seed: int) -> Path:
    """Return the folder of a seed's run."""
    return output / f"seed-{seed}"


def prepared_folder(options: argparse.Namespace) -> Path:
    """Return the folder of prepared data of a run, which the runs of several seeds share.

    Args:
        options: of one run.
    """
    folder: Path = options.output
    return folder if options.seeds is None else folder.parent


def _result(seed: int, in_place_of: int | None, trained: Trained, selection: Selection) -> SeedRun:
    has_diverged = trained.divergence is not None
    return SeedRun(
        seed=seed,
        value=None if has_diverged else selection.best,
        step=None if has_diverged else selection.best_step,
        has_collapsed=has_diverged or selection.has_collapsed,
        in_place_of=in_place_of,
        has_diverged=has_diverged,
    )


def _fate(run: SeedRun) -> str:
    return "diverged" if run.has_diverged else "collapsed"


def summarize(runs: Sequence[SeedRun], figure: str) -> dict[str, Any]:
    """Return median, mean and spread of the runs that did not collapse, and the best of them."""
    counted = [run for run in runs if not run.has_collapsed]
    values = [run.value for run in counted if run.value is not None]
    summary: dict[str, Any] = {"figure": figure, "count": len(values)}
    if not values:
        return summary
    best_value = (min if figure in LOWEST else max)(values)
    best = next(run for run in counted if run.value == best_value)
    return summary | {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min(values),
        "max": max(values),
        "best_seed": best.seed,
    }


def _write(output: Path, runs: Sequence[SeedRun], selection: Selection) -> None:
    """Write the figures of the runs so far, and link the best."""
    summary = summarize(runs, selection.figure)
    content = {**summary, "chance": selection.chance, "runs": [asdict(run) for run in runs]}
    write_atomically(output / _RESULTS, (json.dumps(content, indent=2) + "\n").encode())
    if "best_seed" not in summary:
        return
    best = folder_of(output, summary["best_seed"]) / _BEST
    if best.is_dir():
        fresh = partial_path(output / _BEST)
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(best.relative_to(output), target_is_directory=True)
        os.replace(fresh, output / _BEST)


def _report(output: Path, runs: Sequence[SeedRun]) -> None:
    """Print the figures of all runs.

    Raises:
        RunError: all of them have collapsed.
    """
    summary = json.loads((output / _RESULTS).read_bytes())
    figure = summary["figure"]
    for run in runs:
        value = "none" if run.value is None else f"{run.value:.4f} at step {run.step:,}"
        notes = [f"in place of seed {run.in_place_of}"] if run.in_place_of is not None else []
        notes += [_fate(run)] if run.has_collapsed else []
        print(f"seed {run.seed}: {figure} {value}{''.join(f', {note}' for note in notes)}")
    if "median" not in summary:
        raise RunError(
            f"all {len(runs)} runs have collapsed or diverged ({output / _RESULTS}), so that there "
            "is no best one; try lower rates or more steps, with another --output"
        )
    print(
        f"median {summary['median']:.4f} of {summary['count']} runs, from {summary['min']:.4f} "
        f"to {summary['max']:.4f}, standard deviation {summary['standard_deviation']:.4f}; "
        f"the best, in {output / _BEST}: seed {summary['best_seed']}"
    )
