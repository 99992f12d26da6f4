"""Records of CSV, TSV, JSONL and Parquet files, each with its place; or the error of a place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from albert_serve.api.wire import MAX_CHARS
from albert_serve.errors import AlbertServeError
from albert_serve.tables.columnar import class_names, read_columns, read_schema
from albert_serve.tables.delimited import read_rows
from albert_serve.tables.formats import (
    Format,
    TableType,
    detect_type,
    has_known_suffix,
    is_utf8,
    json_rows,
    open_lines,
    repeated_names,
)


class Record(NamedTuple):
    """A row's values by column; None in columns at which a short row has ended.

    Attributes:
        place: file and line, or row where a file has no lines.
        header: file, and the line that names the columns.
        classes: names of the classes 0, 1, ... of a column, where the file has them.
    """

    values: dict[str, Any]
    place: str
    header: str
    classes: Mapping[str, Sequence[str]] = MappingProxyType({})


class RowError(NamedTuple):
    """An error in a file, which its reader goes on after where it can."""

    message: str


_Row: TypeAlias = "Record | RowError"
# The first row of a file to its columns' names, where that row is no header; else to none.
NamesByOrder: TypeAlias = Callable[[Sequence[str]], Sequence[str]]
_ReadT = TypeVar("_ReadT")


def read_records(
    file: Path, delimiter: str | None = None, headerless: NamesByOrder | None = None
) -> Iterator[_Row]:
    """Yield the records of a file, whose suffix gives the format, and its errors.

    `.tsv`, `.csv`, `.jsonl`, `.ndjson` or `.json` (lines, or an array), optionally with `.gz`,
    `.bz2`, `.xz` or `.zst`; `.parquet`, or `.arrow` as `datasets` saves it. Files of other suffixes
    are TSV if the delimiter is given as a tab.

    Args:
        delimiter: of CSV and TSV files; None to detect it.
        headerless: for CSV and TSV files that may lack a header, whose rows may then be shorter.
    """
    is_named = has_known_suffix(file) or ".json" in file.suffixes
    chosen: Format | None = "tsv" if not is_named and delimiter == "\t" else None
    try:
        if not (is_named or chosen):
            yield RowError(f"{file}: the format is unknown; name it .csv, .tsv, .jsonl or .parquet")
            return
        kind = detect_type(file, chosen)
        if kind.is_columnar:
            rows = _columnar_records(file, kind)
        elif kind.format == "jsonl":
            rows = _json_records(file, kind)
        else:
            rows = _table_records(file, kind, delimiter, headerless)
        yield from map(_refuse_long, rows)
    except (AlbertServeError, OSError) as error:
        yield RowError(str(error))


def _refuse_long(row: _Row) -> _Row:
    """Return a row, or the error of one with a text that would take gigabytes to tokenise."""
    if isinstance(row, RowError):
        return row
    for name, value in row.values.items():
        if isinstance(value, str) and len(value) > MAX_CHARS:
            return RowError(
                f"{row.place}: the column {name!r} has {len(value):,} characters, at most "
                f"{MAX_CHARS:,} are read; split it, or leave it out"
            )
    return row


def gather_rows(
    files: Sequence[Path],
    read: Callable[[Path], Iterator[_ReadT | RowError]],
    name: str,
    errors: list[str],
) -> list[_ReadT]:
    """Return what is read of files, and append the errors.

    Args:
        name: of what is read; that there is none is an error.
    """
    rows: list[_ReadT] = []
    num_before = len(errors)
    for row in chain.from_iterable(map(read, files)):
        if isinstance(row, RowError):
            errors.append(row.message)
        else:
            rows.append(row)
    if not rows and len(errors) == num_before:
        errors.append(f"no {name} in {', '.join(map(str, files))}")
    return rows


def _table_records(
    file: Path, kind: TableType, delimiter: str | None, headerless: NamesByOrder | None
) -> Iterator[_Row]:
    with open_lines(file, kind.compression) as (stream, _):
        delimiter, rows = read_rows(file, stream, kind.format, delimiter=delimiter)
        number, names = next(rows, (1, []))
        header = f"{file}, line {number}"
        # A first row of one field has another delimiter.
        if headerless and len(names) > 1 and (unnamed := headerless(names)):
            rows, names = chain([(number, names)], rows), list(unnamed)
        if repeated := repeated_names([name for name in names if name]):
            yield RowError(
                f"{header}: columns of the same name ({', '.join(repeated)}); its columns "
                f"are {', '.join(names)}"
            )
            return
        for number, fields in rows:
            yield _table_record(f"{file}, line {number}", header, names, fields, delimiter)


def _table_record(
    place: str, header: str, names: Sequence[str], fields: Sequence[str], delimiter: str
) -> _Row:
    if len(fields) > len(names):
        return RowError(
            f"{place}: {len(fields)} fields, more than the header's {len(names)} "
            f"(delimiter {delimiter!r}; --delimiter gives another)"
        )
    if not all(map(is_utf8, fields)):
        return RowError(
            f"{place}: it is not UTF-8; convert the file, as iconv -f CP1252 -t UTF-8 does"
        )
    missing = [None] * (len(names) - len(fields))
    return Record(dict(zip(names, [*fields, *missing], strict=True)), place, header)


def _json_records(file: Path, kind: TableType) -> Iterator[_Row]:
    with open_lines(file, kind.compression) as (stream, _):
        for where, values, error in json_rows(stream):
            place = f"{file}, {where}"
            yield Record(values, place, place) if error is None else RowError(f"{file}, {error}")


def _columnar_records(file: Path, kind: TableType) -> Iterator[_Row]:
    schema, _ = read_schema(file, kind)
    classes = class_names(schema)
    for start, _, batch in read_columns(file, kind):
        for number, record in enumerate(batch.to_pylist(), start=start + 1):
            yield Record(record, f"{file}, row {number}", str(file), classes)
