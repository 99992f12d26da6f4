"""The aligned text of nested names and values, whose form for programs is JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_INDENT = "  "
_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def content_text(content: Mapping[str, Any]) -> str:
    """Return nested mappings as indented lines without empty values, each part after a blank line.

    Names lose their underscores, numbers get separators, and sizes a unit; a list of mappings with
    the same names is a table.
    """
    parts = [
        "\n".join([_words(name), *(_INDENT + line for line in _lines(value))])
        for name, value in content.items()
        if isinstance(value, Mapping | list) and _lines(value)
    ]
    plain = {
        name: value for name, value in content.items() if not isinstance(value, Mapping | list)
    }
    return "\n\n".join(part for part in ["\n".join(_lines(plain)), *parts] if part)


def _printable(text: str) -> str:
    """Escape the control characters of a label, which a terminal would take for commands."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _in_bytes(size: float) -> str:
    """Format a size in the unit that leaves one to three digits before the point."""
    for unit, name in _BYTE_UNITS:
        if abs(size) >= unit:
            scaled = size / unit
            decimals = 2 if abs(scaled) < 10 else 1 if abs(scaled) < 100 else 0
            return f"{scaled:.{decimals}f} {name}"
    return f"{size:.0f} B"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return _tree(value)
    if not _is_nested(value):
        return [_shown("", value)] if value else []
    if len({tuple(row) if isinstance(row, Mapping) else None for row in value}) == 1:
        names = list(value[0])
        if names and not any(_is_nested(cell) for row in value for cell in row.values()):
            return _table([names, *([_shown(n, row[n]) for n in names] for row in value)])
    return _tree({str(number): item for number, item in enumerate(value, start=1)})


def _tree(content: Mapping[str, Any]) -> list[str]:
    empty: tuple[object, ...] = (None, [], "")
    leaves = [
        _words(name)
        for name, value in content.items()
        if value not in empty and not _is_nested(value)
    ]
    width = max(map(len, leaves), default=0)
    lines: list[str] = []
    for name, value in content.items():
        if _is_nested(value):
            inner = [_INDENT + line for line in _lines(value)]
            lines += [_words(name), *inner] if inner else []
        elif value not in empty:
            lines.append(f"{_words(name):<{width}}  {_shown(name, value)}")
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [[*map(_words, rows[0])], *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _INDENT.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _words(name: str) -> str:
    name = _printable(name)
    return name if "." in name else name.removesuffix("_bytes").replace("_", " ")


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, Mapping | list) for item in value)
    return isinstance(value, Mapping)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(name, item) for item in value)
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return _in_bytes(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return _printable(str(value))
