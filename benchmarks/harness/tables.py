"""Tables in Markdown, and the pages that have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.harness.errors import BenchmarkError


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is aligned to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rule, *rows])


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "\n".join(f"- {line}" for line in lines)


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the text between two lines of a page.

    Raises:
        BenchmarkError: the page does not have both.
        OSError: it cannot be read or written.
    """
    before, has_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise BenchmarkError(
            f"{page} must have the lines {begin} and {end}; tables go between them"
        )
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")
