"""Tables of Markdown."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

_LONGEST: Final = 300


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table; cells are shown as text, whatever they hold."""
    return [
        _line(header),
        _line(["---"] * len(header)),
        *(_line([cell(value) for value in row]) for row in rows),
        "",
    ]


def cell(value: object) -> str:
    """Return a value as the text of a cell: numbers rounded, long texts shortened."""
    if isinstance(value, float):
        return f"{value:,.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    text = " ".join(str(value).split())
    if len(text) > _LONGEST:
        text = text[: _LONGEST - 3] + "..."
    escaped = html.escape(text, quote=False)
    for mark in ("\\", "|", "`", "*", "_", "[", "]"):
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
