"""Data files: their formats, rows and columns, for training and for scoring.

The standard library reads CSV, TSV and JSONL row by row, so an invalid row is an error only in this
row. pyarrow's readers of CSV and JSON stop at a row with a different number of fields, with values
of a different type, or with bytes that are not UTF-8. pyarrow reads Parquet and Zstandard.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from albert_serve.tables import columnar, delimited, jsonl
from albert_serve.tables.formats import TableType, open_lines
from albert_serve.tables.rows import ReadOptions, Row, check_characters

__all__ = ["ReadOptions", "Row", "read_rows", "read_unchecked"]

_DEFAULTS: Final = ReadOptions()


def read_rows(
    file: Path,
    kind: TableType,
    options: ReadOptions = _DEFAULTS,
    prefix: str | None = None,
) -> Iterator[Row]:
    """Yield the rows of a file. A row that cannot be read has an error.

    Args:
        prefix: text before the line or row number in locations (default: the file).
    """
    for row in read_unchecked(file, kind, options, prefix):
        yield row if kind.is_columnar else check_characters(row)


def read_unchecked(
    file: Path, kind: TableType, options: ReadOptions = _DEFAULTS, prefix: str | None = None
) -> Iterator[Row]:
    """Yield the rows of a file like `read_rows`, but texts may contain lone surrogates."""
    prefix = f"{file}, " if prefix is None else prefix
    if kind.is_columnar:
        yield from columnar.read_rows(file, kind, prefix=prefix)
        return
    with open_lines(file, kind.compression) as lines:
        if kind.format == "jsonl":
            rows = jsonl.read_rows(lines, prefix, is_strict=options.is_strict)
        else:
            rows = delimited.open_table(file, lines, kind.format, options).rows(prefix)
        for row in rows:
            yield row._replace(position=lines.position())
