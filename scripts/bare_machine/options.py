"""How sizes, times and ranges are written on the command line."""

from __future__ import annotations

import argparse
import math
import re
from typing import Final

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_BYTES: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `90s`, `9m` or `1.5h`.

    Raises:
        argparse.ArgumentTypeError: it is not written so.
    """
    seconds = _number(text[:-1]) * _SECONDS.get(text[-1:], math.nan)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 90s, 9m or 1.5h")
    return seconds


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `512KiB` or `60MiB`.

    Raises:
        argparse.ArgumentTypeError: it is not written so.
    """
    num_bytes = _number(text[:-3]) * _BYTES.get(text[-3:], math.nan)
    if not 1 <= num_bytes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512KiB or 60MiB")
    return int(num_bytes)


def parse_count(text: str) -> int:
    """A whole number from 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not re.fullmatch("[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def parse_range(text: str) -> range:
    """The numbers of `4:8`, which are 4 to 7.

    Raises:
        argparse.ArgumentTypeError: it is not written so, or empty.
    """
    found = re.fullmatch("([0-9]+):([0-9]+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of pieces; write 4:8 for 4 to 7")
    return range(int(found[1]), int(found[2]))


def describe_bytes(num_bytes: int) -> str:
    """A size as people read it."""
    return f"{num_bytes / (1 << 20):.1f} MiB"


def describe_range(numbers: range) -> str:
    """A range as `parse_range` reads it."""
    return f"{numbers.start}:{numbers.stop}"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
