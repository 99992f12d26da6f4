"""Command-line options that several programs share, and parsers of their values."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from training.conversion.hub import HubModel, check_reachable, download, find_cached
from training.data.labelled.columns import Columns
from training.data.labelled.race import RACE
from training.data.mask_rate import MaskRates
from training.glue.files import patterns_of
from training.glue.tasks import TASKS, task_name
from training.loop.progress import RunError
from training.model.checkpoint import CheckpointError
from training.optim.optimizers import OptimizerName, ScheduleName
from training.system.precision import PrecisionName

# At a commit, so that a task has the same files today and when a run is resumed.
GLUE = HubModel(
    repo_id="nyu-mll/glue",
    revision="bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c",
    repo_type="dataset",
)
# Options of the user's own files, which a task has in its table.
_OWN_FILES = (
    *("text_classification", "multiple_choice", "problem_type", "labels", "teacher"),
    *("text_column", "pair_column", "label_column", "label_separator", "choice_columns"),
    "delimiter",
)
_SENTENCE_WEIGHT = "weight of the sentence task's loss; 1 in the paper, with 4096 sequences a step"


def add_end(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options for the end of a run, and return their group."""
    end = parser.add_argument_group("end of the run (whichever is reached first)")
    end.add_argument("--steps", type=parse_count)
    end.add_argument("--budget", type=parse_duration, help="training time, such as 25m or 2h")
    return end


def check_end(options: argparse.Namespace) -> None:
    """Check that a run has an end, by `add_end` or by the recipe of the paper.

    Raises:
        RunError: it has none.
    """
    names = [name for name in ("steps", "epochs", "budget") if name in options]
    ends = [f"--{name}" for name in names]
    has_end = any(getattr(options, name) is not None for name in names)
    if "recipe" in options:
        ends.append("--recipe paper")
        has_end |= options.recipe == "paper"
    if not has_end:
        raise RunError(f"a run needs an end: give {', '.join(ends[:-1])} or {ends[-1]}")


def add_task(group: argparse._ActionsContainer) -> None:
    """Add the options of a task of GLUE, or RACE; `with_task_data` checks and completes them."""
    titles = ", ".join(task.title for task in TASKS.values())
    group.add_argument(
        "--task", type=_parse_task, metavar="NAME", help=f"a task of GLUE ({titles}), or RACE"
    )
    group.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help=f"the folder with the official files of --task (downloaded: {GLUE.repo_id} of the "
        f"Hugging Face Hub; {GLUE.repo_id}@main takes its newest version)",
    )


def with_task_data(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with the folder of the task's files, which are downloaded if need be.

    Raises:
        RunError: a folder is given without a task, other files with one, or the files must be
            given or cannot be downloaded.
    """
    _check_task(options)
    source = _glue_of(options.data) if options.task in TASKS else None
    if source is None:
        return options
    try:
        folder = _download_task(source, options.task)
    except CheckpointError as error:
        has = f"the cache has {others}; " if (others := _cached_tasks(source)) else ""
        raise RunError(
            f"{error}; {has}--data names a folder with the files of --task {options.task}"
        ) from error
    return argparse.Namespace(**{**vars(options), "data": folder})


def _check_task(options: argparse.Namespace) -> None:
    if options.task is None:
        if options.data is not None:
            raise RunError(f"--data {options.data} is the folder of a task; give --task")
        return
    options_given = [name for name in _OWN_FILES if getattr(options, name, None) not in (None, [])]
    if options_given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options_given)
        raise RunError(f"--task has its own files, columns and labels; leave out {names}")
    if options.task == RACE and options.data is None:
        raise RunError("--task RACE needs --data, the folder of its files")


def _glue_of(data: Path | None) -> HubModel | None:
    """Return the repository to download from; None where the files are in a folder."""
    if data is None:
        return GLUE
    named = None if data.exists() else HubModel.parse(str(data))
    if named is None or named.repo_id != GLUE.repo_id:
        return None
    return replace(GLUE, revision=named.revision or GLUE.revision)


def _download_task(source: HubModel, task: str) -> Path:
    """Download the files of a task of GLUE; return their folder.

    Raises:
        CheckpointError: they cannot be downloaded, or there are none.
    """
    patterns = [f"{task}/{name}" for name in patterns_of(TASKS[task])]
    # The files of a commit stay as they are; those of a branch may have changed.
    cached = find_cached(source, patterns) if source == GLUE else None
    folder = cached or download(source, patterns)
    if not (folder / task).is_dir():
        check_reachable(source, task)
        raise CheckpointError(f"{source} has no files of {task}")
    return folder / task


def _cached_tasks(source: HubModel) -> str:
    """Return the names of the tasks that the cache has files of."""
    folder = find_cached(source, ())
    names = [] if folder is None else [path.name for path in folder.iterdir()]
    return ", ".join(sorted(name for name in names if name in TASKS))


def _parse_task(text: str) -> str:
    try:
        return RACE if text.lower() == RACE else task_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, {RACE}") from error


def add_columns(group: argparse._ActionsContainer) -> None:
    """Add the options that name the columns of labelled texts; `columns_of` reads them."""
    add = group.add_argument
    add("--text-column", metavar="NAME", help="column of the text (text, sentence, ...)")
    add("--pair-column", metavar="NAME", help="column of the second text of a pair")
    add(
        "--label-column",
        nargs="+",
        metavar="NAME",
        help="column of the label (label, category, ...); or a column of 0 and 1 for each of "
        "several labels",
    )
    add("--label-separator", metavar="TEXT", help="divides a column into several labels of a text")
    add("--delimiter", help="of CSV files, one character (detected from the header)")


def add_choices(group: argparse._ActionsContainer) -> None:
    """Add the options of the files of multiple choice; the other columns are `add_columns`'."""
    group.add_argument(
        "--multiple-choice",
        nargs="+",
        type=Path,
        help="CSV, TSV, JSONL or Parquet files, files of RACE, or folders of them",
    )
    group.add_argument(
        "--choice-columns",
        nargs="+",
        default=[],
        metavar="NAME",
        help="columns of the choices of --multiple-choice, or the one with a list of them "
        "(choices, or ending0, ending1, ...); its context is the text column, and a question or "
        "beginning before each choice the pair column",
    )


def columns_of(options: argparse.Namespace) -> Columns:
    """Return the columns that the options name.

    Raises:
        RunError: the delimiter is not one character, or labels stand in one column and in several.
    """
    labels = options.label_column or []
    if len(labels) > 1 and options.label_separator is not None:
        raise RunError("--label-separator divides one column; leave it out, or give one column")
    if len(set(labels)) < len(labels):
        raise RunError(f"--label-column {' '.join(labels)}: give each column once")
    if options.delimiter is not None and len(options.delimiter) != 1:
        raise RunError(f"--delimiter {options.delimiter!r}: give one character, such as ';'")
    return Columns(
        text=options.text_column,
        pair=options.pair_column,
        label=labels[0] if len(labels) == 1 else None,
        delimiter=options.delimiter,
        indicators=tuple(labels) if len(labels) > 1 else (),
        separator=options.label_separator,
    )


def add_optimization(group: argparse._ArgumentGroup, defaults: Mapping[str, float | str]) -> None:
    """Add the options of the optimizers.

    Args:
        defaults: by the options' names; None for an option that it lacks.
    """
    add = group.add_argument
    add(
        "--optimizer",
        choices=get_args(OptimizerName),
        help="muon trains the layers' matrices, and AdamW the rest",
    )
    add("--lr", type=parse_positive, help="peak learning rate; with muon of the layers' matrices")
    add("--adamw-lr", type=parse_positive, help="with muon, the peak learning rate of the rest")
    add("--weight-decay", type=parse_part, help="weight decay of matrices")
    add("--schedule", choices=get_args(ScheduleName), help="learning-rate schedule")
    add("--warmup", type=parse_part, help="fraction of the run that is warm-up")
    add("--decay", type=parse_part, help="fraction of the run that is decay, with wsd")
    add("--sentence-weight", type=parse_part, help=_SENTENCE_WEIGHT)
    add("--clip-norm", type=parse_positive, help="maximum gradient norm")
    add("--seed", type=parse_seed, help="seed of data order, masks and dropout")
    for action in group._group_actions:
        if action.dest in defaults:
            action.default = defaults[action.dest]
            action.help = f"{action.help} (%(default)s)"


def add_mask_rate(group: argparse._ActionsContainer, default: str) -> None:
    """Add the option of the fraction of the tokens that is predicted; `mask_rates_of` reads it."""
    group.add_argument(
        "--mask-rate",
        nargs="+",
        type=parse_part,
        metavar="RATE",
        help=f"fraction of the tokens that is predicted ({default}); two, such as 0.3 0.15, for "
        "one that changes linearly over the run",
    )


def mask_rates_of(given: Sequence[float]) -> MaskRates:
    """Return the mask rates of a run by the values of `--mask-rate`.

    Raises:
        RunError: there are more than two.
    """
    if len(given) > 2:
        raise RunError(f"--mask-rate takes one rate, or the first and the last: not {given}")
    return MaskRates(first=given[0], last=given[-1])


def add_order(group: argparse._ActionsContainer) -> None:
    """Add the options of steps on pairs in both orders."""
    add = group.add_argument
    add(
        "--order-share",
        type=parse_part,
        help="fraction of the steps of pretraining that learn sentence order from both orders of a "
        "pair, without masks, in place of the masked rows' sentence task (0)",
    )
    add("--order-length", type=parse_count, help="maximum tokens of such a pair (512)")
    add("--order-sentences", type=parse_count, help="least sentences of each side of a pair (2)")


def check_order_share(share: float | None) -> None:
    """Check that steps on masked tokens are left.

    Raises:
        RunError: there are none.
    """
    if share == 1:
        raise RunError("--order-share 1 leaves no step to masked tokens; give less")


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Add the options for device, checkpoints and reports; they change last digits at most."""
    group = parser.add_argument_group("device and output")
    add = group.add_argument
    add_device(group)
    add(
        "--precision",
        choices=get_args(PrecisionName),
        default="auto",
        help="of matrix products; auto measures which is faster, and a resumed run keeps it (auto)",
    )
    add("--save-every", type=parse_duration, default=300.0, help="time between checkpoints (5m)")
    add("--keep", type=parse_count, default=2, help="checkpoints to keep (2)")
    add("--report-every", type=parse_count, default=50, help="steps per line of metrics (50)")


def add_device(group: argparse._ActionsContainer) -> None:
    """Add the option of the device, which is read as a `torch.device`."""
    group.add_argument(
        "--device",
        type=parse_device,
        default="auto",
        help="auto, cpu, cuda, cuda:1, ...; auto takes the GPU if there is one (%(default)s)",
    )


def add_compile(group: argparse._ArgumentGroup, *, default: bool | None = None) -> None:
    """Add the option of compilation; `should_compile` reads it.

    Args:
        default: None to compile where it is possible.
    """
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=default,
        help="compile the model: faster steps after some minutes at the start (default: "
        + ("no)" if default is False else "yes, where there is a compiler)"),
    )


def should_compile(options: argparse.Namespace) -> bool:
    """Whether to compile: as the option says, otherwise if it is possible.

    Raises:
        RunError: `--compile` is given on a CPU without a C++ compiler.
    """
    # The compiler that torch's inductor starts on a CPU.
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    is_possible = options.device.type != "cpu" or shutil.which(name) is not None
    if is_possible or options.compile is False:
        return options.compile is not False
    if options.compile:
        raise RunError(f"--compile needs a C++ compiler on a CPU, and there is no {name}")
    print(f"training is not compiled, and slower: there is no C++ compiler {name}")
    return False


def parse_device(text: str) -> torch.device:
    """Parse the name of a device that torch can use here; `auto` is the GPU, or else the CPU."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # torch may be built without it
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be used: {reason}; give auto, cpu, cuda, cuda:1, ..."
        ) from error
    return device


def parse_duration(text: str) -> float:
    """Parse a duration such as `90s`, `25m` or `1.5h` into seconds.

    Raises:
        argparse.ArgumentTypeError: the format is invalid.
    """
    units = {"s": 1, "m": 60, "h": 3600}
    try:
        seconds = float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 90s, 25m or 1.5h")
    return seconds


def parse_count(text: str) -> int:
    """Parse an integer from 1.

    Raises:
        argparse.ArgumentTypeError: the text is invalid.
    """
    return _parse_whole(text, least=1)


def parse_seed(text: str) -> int:
    """Parse an integer from 0; raises as `parse_count`."""
    return _parse_whole(text, least=0)


def parse_positive(text: str) -> float:
    """Parse a number above 0; raises as `parse_count`."""
    return _parse_number(text, lambda number: 0 < number < math.inf, "above 0")


def parse_weight(text: str) -> float:
    """Parse a number from 0; raises as `parse_count`."""
    return _parse_number(text, lambda number: 0 <= number < math.inf, "from 0")


def parse_part(text: str) -> float:
    """Parse a number from 0 to 1; raises as `parse_count`."""
    return _parse_number(text, lambda number: 0 <= number <= 1, "from 0 to 1")


def parse_finite(text: str) -> float:
    """Parse a number; raises as `parse_count`."""
    return _parse_number(text, math.isfinite, "that is finite")


def _parse_whole(text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least}")
    return int(text)


def _parse_number(text: str, is_allowed: Callable[[float], bool], range_: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not is_allowed(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no number {range_}")
    return number
