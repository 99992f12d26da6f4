"""Types of a configuration's fields, which parse text and check values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The range of numbers that an option allows."""

    kind: type[int] | type[float]
    description: str
    allows: Callable[[float], bool]

    def parse(self, text: str) -> Any:
        """Parse a number."""
        try:
            number = self.kind(text)
        except ValueError:
            number = math.nan
        if not self.allows(number) or (self.kind is int and not text.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not {self.description}.")
        return number

    def check(self, value: Any) -> Any:
        """Return a value from the Python API, or raise the same errors as `parse`."""
        if not isinstance(value, int | self.kind) or not self.allows(value):
            raise argparse.ArgumentTypeError(f"{value!r} is not {self.description}.")
        return self.kind(value)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A type of values that can be written as text, such as `2:4`."""

    parse: Callable[[str], Any]

    def check(self, value: Any) -> Any:
        """Return a value from the Python API, which may be text."""
        return self.parse(value) if isinstance(value, str) else value


_COUNTS: Final = NumberRange(int, "a whole number from 1", lambda number: number >= 1)
_SEEDS: Final = NumberRange(int, "a whole number from 0", lambda number: number >= 0)
_POSITIVE: Final = NumberRange(float, "a number above 0", lambda number: 0 < number < math.inf)
_CLOSED_FRACTION: Final = NumberRange(
    float, "a number from 0 to 1", lambda number: 0 <= number <= 1
)
_FRACTION_BELOW_ONE: Final = NumberRange(
    float, "a number from 0 to below 1", lambda number: 0 <= number < 1
)
_FINITE: Final = NumberRange(float, "a finite number", math.isfinite)

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
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration. Use a value such as 90s, 25m or 1.5h."
        )
    return seconds


Count: TypeAlias = Annotated[int, _COUNTS]
Seed: TypeAlias = Annotated[int, _SEEDS]
Positive: TypeAlias = Annotated[float, _POSITIVE]
Fraction: TypeAlias = Annotated[float, _CLOSED_FRACTION]
# A share is below 1, so that some of the whole remains.
Share: TypeAlias = Annotated[float, _FRACTION_BELOW_ONE]
Finite: TypeAlias = Annotated[float, _FINITE]
# A duration is a number of seconds.
Duration: TypeAlias = Annotated[float, Parsed(parse_duration)]
