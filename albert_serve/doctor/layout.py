"""Text layout: headed sections of aligned lines, and numbers with units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_INDENT = "  "
_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def section(title: str, lines: Iterable[str]) -> list[str]:
    """Return a blank line, a title and indented lines; nothing without lines."""
    indented = [f"{_INDENT}{line}".rstrip() for line in lines]
    return ["", title, *indented] if indented else []


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Align rows in columns, each as wide as its widest cell."""
    cells = list(rows)
    return _align(cells, [False] * len(cells[0])) if cells else []


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align a header and rows in columns, numbers right-aligned; nothing without rows."""
    are_numbers = [all(map(_is_number, column)) for column in zip(*rows, strict=True)]
    return _align([header, *rows], are_numbers) if rows else []


def tree(content: Mapping[str, object]) -> list[str]:
    """Return nested mappings and lists as indented lines, without empty values."""
    leaves = [(name, value) for name, value in content.items() if not _is_nested(value)]
    width = max((len(name) for name, _ in leaves), default=0)
    lines: list[str] = []
    for name, value in content.items():
        if _is_nested(value):
            inner = [_INDENT + line for line in tree(_by_name(value))]
            lines += [name, *inner] if inner else []
        else:
            lines.append(f"{name:<{width}}  {_shown(value)}".rstrip())
    return lines


def in_bytes(size: float) -> str:
    """Format a size in the unit that leaves one to three digits before the point."""
    for unit, name in _BYTE_UNITS:
        if abs(size) >= unit:
            return f"{size / unit:.{_decimals(size / unit)}f} {name}"
    return f"{size:.0f} B"


def rounded(value: float) -> str:
    """Format a number with at least three digits, and thousands separators."""
    return f"{value:,.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0


def _align(rows: Sequence[Sequence[str]], to_the_right: Sequence[bool]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, to_the_right, strict=True)
        padded = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells]
        lines.append(_INDENT.join(padded).rstrip())
    return lines


def _is_number(cell: str) -> bool:
    return cell.removeprefix("-")[:1].isdigit()


def _is_nested(value: object) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, Mapping | list) for item in value)
    return isinstance(value, Mapping)


def _by_name(value: object) -> Mapping[str, object]:
    """Return a mapping as it is; a list as a mapping from its numbers, from 1."""
    if isinstance(value, Mapping):
        return value
    assert isinstance(value, list)
    return {str(number): item for number, item in enumerate(value, start=1)}


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
