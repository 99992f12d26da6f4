"""Records of CSV, TSV, JSONL and Parquet files, each with its place; or the error of a place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from albert_serve.errors import AlbertServeError
from albert_serve.tables import (
    csv_fields,
    csv_rows,
    is_utf8,
    json_rows,
    open_lines,
    parquet_batches,
    repeated_names,
    text_lines,
    type_by_name,
)

_DELIMITERS: Final = ",;\t|"


class Record(NamedTuple):
    """A row's values by column; None in columns at which a short row has ended.

    Attributes:
        place: file and line, or row where a file has no lines.
        header: file, and the line that names the columns.
    """

    values: dict[str, Any]
    place: str
    header: str


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

    `.tsv`, `.csv` or `.jsonl`, optionally with `.gz`, `.bz2`, `.xz` or `.zst`; or `.parquet`.
    Files of other suffixes are TSV if the delimiter is given as a tab.

    Args:
        delimiter: of CSV and TSV files; None to detect it.
        headerless: for CSV and TSV files that may lack a header, whose rows may then be shorter.
    """
    suffixes = set(file.suffixes)
    try:
        if ".parquet" in suffixes:
            yield from _parquet_records(file)
        elif ".jsonl" in suffixes:
            yield from _json_records(file)
        elif suffixes & {".tsv", ".csv"} or delimiter == "\t":
            yield from _table_records(file, delimiter, headerless)
        else:
            yield RowError(f"{file}: the format is unknown; name it .csv, .tsv, .jsonl or .parquet")
    except (AlbertServeError, OSError) as error:
        yield RowError(str(error))


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


def likely_delimiter(header: str) -> str | None:
    """Return the delimiter that divides a header into the most columns; None if none does."""
    counts = {delimiter: len(csv_fields(header, delimiter)) for delimiter in _DELIMITERS}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > 1 else None


def _table_records(
    file: Path, delimiter: str | None, headerless: NamesByOrder | None
) -> Iterator[_Row]:
    is_csv = ".csv" in file.suffixes
    with open_lines(file, type_by_name(file.name).compression) as (stream, _):
        lines = text_lines(file, stream)
        first = next(lines, "")
        delimiter = delimiter or ((likely_delimiter(first) or ",") if is_csv else "\t")
        # As in GLUE, quotes are ordinary characters of a TSV file.
        rows = csv_rows(file, chain([first], lines), delimiter, has_quotes=is_csv)
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
        return RowError(f"{place}: it is not UTF-8")
    missing = [None] * (len(names) - len(fields))
    return Record(dict(zip(names, [*fields, *missing], strict=True)), place, header)


def _json_records(file: Path) -> Iterator[_Row]:
    with open_lines(file, type_by_name(file.name).compression) as (stream, _):
        for number, values, error in json_rows(stream):
            place = f"{file}, line {number}"
            yield Record(values, place, place) if error is None else RowError(f"{file}, {error}")


def _parquet_records(file: Path) -> Iterator[_Row]:
    for start, _, batch in parquet_batches(file):
        for number, record in enumerate(batch.to_pylist(), start=start + 1):
            yield Record(record, f"{file}, row {number}", str(file))
