"""Records of CSV, TSV, JSONL and Parquet files, each with its place; or the error of a place."""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from training.data.corpus import MAX_LINE_CHARACTERS, CorpusError, read_lines

_DELIMITERS: Final = ",;\t|"
_QUOTING: Final = "a quoted field ends at its second quote, and quotes in it are doubled"


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


Row: TypeAlias = "Record | RowError"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFormat:
    """Properties of CSV and TSV files that their text does not tell.

    Attributes:
        delimiter: None to detect it.
        headerless: names of the columns of files without a header; a file whose first row holds
            one of the names in `named` has a header. Rows may be shorter.
        named: columns that a header has.
    """

    delimiter: str | None = None
    headerless: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    def names_without_header(self, first_row: Sequence[str]) -> Sequence[str] | None:
        """Return the names of the columns if the first row is no header."""
        # A first row of one field has another delimiter.
        is_header = len(first_row) == 1 or not set(first_row).isdisjoint(self.named)
        return None if is_header else self.headerless or None


def read_records(file: Path, form: TableFormat = TableFormat()) -> Iterator[Row]:
    """Yield the records of a file, whose suffix gives the format, and its errors.

    `.tsv`, `.csv` or `.jsonl`, optionally with `.gz`, `.bz2`, `.xz` or `.zst`; or `.parquet`.
    Files of other suffixes are TSV if the delimiter is given as a tab.
    """
    suffixes = set(file.suffixes)
    try:
        if ".parquet" in suffixes:
            yield from _parquet_records(file)
        elif ".jsonl" in suffixes:
            yield from _json_records(file)
        elif suffixes & {".tsv", ".csv"} or form.delimiter == "\t":
            yield from _table_records(file, form)
        else:
            yield RowError(f"{file}: the format is unknown; name it .csv, .tsv, .jsonl or .parquet")
    except (CorpusError, OSError) as error:
        yield RowError(str(error))


def likely_delimiter(header: str) -> str | None:
    """Return the delimiter that divides a header into the most columns; None if none does."""
    counts = {delimiter: len(_split(header, delimiter)) for delimiter in _DELIMITERS}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > 1 else None


def _split(line: str, delimiter: str) -> list[str]:
    csv.field_size_limit(MAX_LINE_CHARACTERS)
    return next(csv.reader([line], delimiter=delimiter), [])


def _table_records(file: Path, form: TableFormat) -> Iterator[Row]:
    lines = read_lines(file)
    first = next(lines, "")
    is_csv = ".csv" in file.suffixes
    delimiter = form.delimiter or ((likely_delimiter(first) or ",") if is_csv else "\t")
    names: Sequence[str] | None = None
    header = ""
    # As in GLUE, quotes are ordinary characters of a TSV file.
    for number, fields in _rows(chain([first], lines), delimiter, has_quotes=is_csv):
        place = f"{file}, line {number}"
        if isinstance(fields, str):
            yield RowError(f"{place}: {fields}")
            if names is None:
                return
            continue
        if not fields:
            continue
        if names is None:
            names, header = form.names_without_header(fields), place
            if names is None:
                names = fields
                repeated = sorted({name for name in names if name and names.count(name) > 1})
                if repeated:
                    yield RowError(
                        f"{header}: columns of the same name ({', '.join(repeated)}); its columns "
                        f"are {', '.join(names)}"
                    )
                    return
                continue
        if len(fields) > len(names):
            yield RowError(
                f"{place}: {len(fields)} fields, more than the header's {len(names)} "
                f"(delimiter {delimiter!r}; --delimiter gives another)"
            )
            continue
        missing = [None] * (len(names) - len(fields))
        yield Record(dict(zip(names, [*fields, *missing], strict=True)), place, header)


class _Lines(Iterator[str]):
    """Lines, of which those of the current row can be read again."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._again: deque[str] = deque()
        self._row: list[str] = []

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._lines)
        self._row.append(line)
        return line

    def end_row(self) -> int:
        """Begin the next row; return how many lines the last one had."""
        num_lines = len(self._row)
        self._row.clear()
        return num_lines

    def read_again(self) -> int:
        """Begin the next row at the second line of the last one; return how many that one had."""
        self._again.extendleft(reversed(self._row[1:]))
        return self.end_row()


def _rows(
    lines: Iterator[str], delimiter: str, *, has_quotes: bool
) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the fields of each row, or why it has none, with the number of its first line.

    Where a row is broken, the next one begins at the line after its first: a stray quote takes the
    rows up to the next quote for its own.
    """
    csv.field_size_limit(MAX_LINE_CHARACTERS)  # of all readers of the process
    source = _Lines(lines)
    reader = csv.reader(
        source,
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
        strict=True,
    )
    number = 1
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last = number + source.read_again() - 1
            # Of a stray quote: "',' expected after '"'" or "unexpected end of data".
            advice = f"; {_QUOTING}" if "expected" in str(error) else ""
            yield number, f"in line {last} {error}{advice}"
            number += 1
        else:
            yield number, fields
            number += source.end_row()


def _json_records(file: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(file), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield RowError(f"{place}: {error}")
            continue
        if isinstance(record, dict):
            yield Record(record, place, place)
        else:
            yield RowError(f"{place}: no JSON object")


def _parquet_records(file: Path) -> Iterator[Row]:
    number = 0
    try:
        for batch in pq.ParquetFile(file).iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield Record(record, f"{file}, row {number}", str(file))
    except (pa.ArrowException, OSError) as error:
        yield RowError(f"{file} cannot be read: {error}")
