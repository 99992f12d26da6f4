"""Records of CSV, TSV, JSONL and Parquet files, each with its place; or the error of a place."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from training.data.corpus import CorpusError, read_lines

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
    except csv.Error as error:
        yield RowError(f"{file}: {error}")
    except (CorpusError, OSError) as error:
        yield RowError(str(error))


def likely_delimiter(header: str) -> str | None:
    """Return the delimiter that divides a header into the most columns; None if none does."""
    counts = {delimiter: len(_split(header, delimiter)) for delimiter in _DELIMITERS}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > 1 else None


def _split(line: str, delimiter: str) -> list[str]:
    return next(csv.reader([line], delimiter=delimiter), [])


def _table_records(file: Path, form: TableFormat) -> Iterator[Row]:
    lines = read_lines(file)
    first = next(lines, "")
    is_csv = ".csv" in file.suffixes
    delimiter = form.delimiter or ((likely_delimiter(first) or ",") if is_csv else "\t")
    # As in GLUE, quotes are ordinary characters of a TSV file.
    reader = csv.reader(
        chain([first], lines),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if is_csv else csv.QUOTE_NONE,
    )
    names: Sequence[str] | None = None
    header, end = "", 0
    for fields in reader:
        begin, end = end + 1, reader.line_num
        if not fields:
            continue
        if names is None:
            names, header = form.names_without_header(fields), f"{file}, line {begin}"
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
        place = f"{file}, line {begin}"
        if len(fields) > len(names):
            yield RowError(
                f"{place}: {len(fields)} fields, more than the header's {len(names)} "
                f"(delimiter {delimiter!r}; --delimiter gives another)"
            )
            continue
        missing = [None] * (len(names) - len(fields))
        yield Record(dict(zip(names, [*fields, *missing], strict=True)), place, header)


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
