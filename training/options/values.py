"""Values of options: the types of a configuration's fields, which parse text and check values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers that an option allows."""

    kind: type[int] | type[float]
    words: str
    allows: Callable[[float], bool]

    def parse(self, text: str) -> Any:
        """Parse a number."""
        try:
            number = self.kind(text)
        except ValueError:
            number = math.nan
        if not self.allows(number) or (self.kind is int and not text.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is no {self.words}")
        return number

    def check(self, value: Any) -> Any:
        """Return a value of the Python API; raises as `parse`."""
        if not isinstance(value, int | self.kind) or not self.allows(value):
            raise argparse.ArgumentTypeError(f"{value!r} is no {self.words}")
        return self.kind(value)


@dataclass(frozen=True, slots=True)
class Parsed:
    """Values that have a text form of their own, such as `2:4`."""

    parse: Callable[[str], Any]

    def check(self, value: Any) -> Any:
        """Return a value of the Python API, which may be given as text."""
        return self.parse(value) if isinstance(value, str) else value


_COUNTS: Final = NumberRange(int, "whole number from 1", lambda number: number >= 1)
_SEEDS: Final = NumberRange(int, "whole number from 0", lambda number: number >= 0)
_POSITIVE: Final = NumberRange(float, "number above 0", lambda number: 0 < number < math.inf)
_PARTS: Final = NumberRange(float, "number from 0 to 1", lambda number: 0 <= number <= 1)
_SHARES: Final = NumberRange(float, "number from 0 to below 1", lambda number: 0 <= number < 1)
_FINITE: Final = NumberRange(float, "number that is finite", math.isfinite)

parse_count: Final = _COUNTS.parse
parse_positive: Final = _POSITIVE.parse


def parse_duration(text: str) -> float:
    """Parse a duration such as `90s`, `25m` or `1.5h` into seconds."""
    units = {"s": 1, "m": 60, "h": 3600}
    try:
        seconds = float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 90s, 25m or 1.5h")
    return seconds


Count: TypeAlias = Annotated[int, _COUNTS]
Seed: TypeAlias = Annotated[int, _SEEDS]
Positive: TypeAlias = Annotated[float, _POSITIVE]
Fraction: TypeAlias = Annotated[float, _PARTS]
# A share is below 1, so that something is left of the whole.
Share: TypeAlias = Annotated[float, _SHARES]
Finite: TypeAlias = Annotated[float, _FINITE]
# A duration is a number of seconds.
Duration: TypeAlias = Annotated[float, Parsed(parse_duration)]
