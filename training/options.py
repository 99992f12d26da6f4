"""Command-line options that pretraining and finetuning share."""

from __future__ import annotations

import argparse
import math

import torch

_SOP_WEIGHT = "of the sentence-order loss; the paper's is 1, with 4096 sequences a step"


def add_end(parser: argparse.ArgumentParser) -> None:
    """Options that end a run."""
    end = parser.add_argument_group("end of the run (the first of both that is reached)")
    end.add_argument("--steps", type=parse_count)
    end.add_argument("--budget", type=parse_duration, help="time of training, such as 25m or 2h")


def add_optimization(
    group: argparse._ArgumentGroup,
    *,
    muon_lr: float,
    adamw_lr: float,
    warmup: float,
    decay: float,
) -> None:
    """Options of the optimizers, with these defaults."""
    add = group.add_argument
    default = "(%(default)s)"
    add("--muon-lr", type=parse_positive, default=muon_lr, help=f"layers' matrices {default}")
    add("--adamw-lr", type=parse_positive, default=adamw_lr, help=f"everything else {default}")
    add("--warmup", type=parse_part, default=warmup, help=f"part of the run {default}")
    add("--decay", type=parse_part, default=decay, help=f"last part of the run {default}")
    add("--sop-weight", type=parse_part, default=0.1, help=f"{_SOP_WEIGHT} {default}")
    add("--clip-norm", type=parse_positive, default=1.0, help=f"gradient norm {default}")
    add("--seed", type=parse_seed, default=0, help="of data order, masks and dropout (0)")
    add("--device", type=torch.device, default=default_device(), help=default)


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Options of what a run writes, which do not change what it computes."""
    parser.add_argument(
        "--save-every", type=parse_duration, default=300.0, help="time between checkpoints (5m)"
    )
    parser.add_argument(
        "--report-every", type=parse_count, default=50, help="steps a line of metrics.jsonl (50)"
    )


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
