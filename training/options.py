"""Command-line options that several programs share, and how their values are written."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import get_args

import torch

from training.optim.optimizers import OptimizerName, ScheduleName

_SENTENCE_WEIGHT = "of the sentence task's loss; the paper's is 1, with 4096 sequences a step"


def add_end(parser: argparse.ArgumentParser) -> None:
    """Options that end a run."""
    end = parser.add_argument_group("end of the run (the first of both that is reached)")
    end.add_argument("--steps", type=parse_count)
    end.add_argument("--budget", type=parse_duration, help="time of training, such as 25m or 2h")


def add_optimization(group: argparse._ArgumentGroup, defaults: Mapping[str, float | str]) -> None:
    """Options of the optimizers.

    Args:
        defaults: by the options' names; what it lacks is None where it is not given.
    """
    add = group.add_argument
    add(
        "--optimizer",
        choices=get_args(OptimizerName),
        help="muon leaves all but the layers' matrices to AdamW",
    )
    add("--lr", type=parse_positive, help="peak rate; with muon that of the layers' matrices")
    add("--adamw-lr", type=parse_positive, help="with muon, the peak rate of everything else")
    add("--weight-decay", type=parse_part, help="of matrices")
    add("--schedule", choices=get_args(ScheduleName), help="of the rate, over steps or the budget")
    add("--warmup", type=parse_part, help="first part of the run")
    add("--decay", type=parse_part, help="last part of the run, with wsd")
    add("--sentence-weight", type=parse_part, help=_SENTENCE_WEIGHT)
    add("--clip-norm", type=parse_positive, help="norm that a gradient is cut to")
    add("--seed", type=parse_seed, help="of data order, masks and dropout")
    for action in group._group_actions:
        if action.dest in defaults:
            action.default = defaults[action.dest]
            action.help = f"{action.help} (%(default)s)"


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Options of where a run computes and what it writes, which do not change what it computes."""
    group = parser.add_argument_group("where it runs, and what it writes")
    add = group.add_argument
    add("--device", type=torch.device, default=default_device(), help="(%(default)s)")
    add("--save-every", type=parse_duration, default=300.0, help="time between checkpoints (5m)")
    add("--keep", type=parse_count, default=2, help="checkpoints that stay (2)")
    add("--report-every", type=parse_count, default=50, help="steps a line of metrics (50)")


def default_device() -> torch.device:
    """The GPU where there is one, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `90s`, `25m` or `1.5h`.

    Raises:
        argparse.ArgumentTypeError: it is not written so.
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
    """A whole number from 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def parse_seed(text: str) -> int:
    """A whole number from 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def parse_positive(text: str) -> float:
    """A number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def parse_weight(text: str) -> float:
    """A number from 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    number = _number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return number


def parse_part(text: str) -> float:
    """A number from 0 to 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    number = _number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
