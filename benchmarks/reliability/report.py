"""Results of a scenario: its figures and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.harness.tables import write_between

_BEGIN: Final = "<!-- figures: python -m benchmarks.reliability --write -->"
_END: Final = "<!-- end of figures -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one scenario.

    Attributes:
        figures: the measured values by name.
        checks: whether each requirement was met.
        curve: memory over time, for a soak: minutes and MB.
    """

    name: str
    figures: dict[str, str]
    checks: dict[str, bool]
    curve: list[tuple[float, float]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all requirements were met."""
        return all(self.checks.values())


def tables(results: Sequence[Result]) -> str:
    """The results in Markdown."""
    lines = ["| scenario | asked for | met | measured |", "| --- | --- | --- | --- |"]
    for result in results:
        measured = "; ".join(f"{name}: {value}" for name, value in result.figures.items())
        for index, (check, met) in enumerate(result.checks.items()):
            first = index == 0
            cells = [result.name if first else "", check, "yes" if met else "**no**"]
            lines.append(f"| {' | '.join([*cells, measured if first else ''])} |")
    for result in results:
        if result.curve:
            lines += ["", f"Memory of the {result.name}, minutes and MB:", ""]
            lines.append(", ".join(f"{at:.0f}: {size:.0f}" for at, size in result.curve))
    return "\n".join(lines) + "\n"


def write_into(page: Path, text: str) -> None:
    """Put the tables between the page's two markers.

    Raises:
        BenchmarkError: it does not have them.
    """
    write_between(page, _BEGIN, _END, text)
