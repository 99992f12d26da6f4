"""CSV and TSV: the delimiter, and rows with the numbers of their lines.

Fields of CSV may be quoted, as in RFC 4180. Of text between tabs, quotes are ordinary characters,
as in GLUE's files, but where they make a field as pandas and Excel write it.
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from albert_serve.errors import InvalidInputError, MalformedRequestError
from albert_serve.tables.formats import MAX_LINE_BYTES, Format, is_utf8, text_lines
from albert_serve.tables.rows import ReadOptions, Row, check_names

# Output is written with these.
DELIMITERS: Final = {"csv": ",", "tsv": "\t"}
_LIKELY: Final = ",;\t|"
# A field in quotes that needs them, in one line and without tabs.
_QUOTED: Final = re.compile(r'""|"(?:[^"]|"")*(?:""|\r)(?:[^"]|"")*"')
# A quoted field of a file with tabs has at most so many lines.
_MAX_QUOTED_LINES: Final = 1000
# The first line of files for Excel, which names the delimiter.
_SEP_LINE: Final = re.compile(r'"?sep=([^\r\n])"?\s*', re.IGNORECASE)


def read_rows(
    path: Path, stream: io.BufferedReader, form: Format, options: ReadOptions
) -> Iterator[Row]:
    """Yield the rows of a table that are not blank."""
    delimiter, cells = read_cells(path, stream, form, options)
    number, names = read_names(path, cells, options)
    header = f"line {number}"
    if options.names_by_order and _lacks_header(names, options):
        cells, names = chain([(number, names)], cells), list(options.names_by_order(names))
    for number, fields in cells:
        place, error = f"line {number}", None
        num_missing = len(names) - len(fields)
        if num_missing < 0 or (num_missing and options.is_strict):
            error = MalformedRequestError(
                f"{place} has {len(fields)} fields; the header has {len(names)} (delimiter "
                f"{delimiter!r}; --delimiter sets another)"
            )
        values: dict[str, Any] = {} if options.is_strict else dict.fromkeys(names)
        values.update(zip(names, fields, strict=False))
        yield Row(place, values, error, header)


def read_names(
    path: Path, cells: Iterator[tuple[int, list[str]]], options: ReadOptions
) -> tuple[int, list[str]]:
    """Return the first row of a table's cells, which names the columns, and its line.

    Raises:
        InvalidInputError: there is none, it is not UTF-8, or several names are the same.
    """
    number, names = next(cells, (1, []))
    if not names:
        raise InvalidInputError(f"{path} is empty; its first line must name the columns")
    if not all(map(is_utf8, names)):
        raise InvalidInputError(
            f"{path}: the names of its columns are not UTF-8; convert the file, as iconv -f CP1252 "
            "-t UTF-8 does"
        )
    if not _lacks_header(names, options):
        check_names(path, names if options.is_strict else list(filter(None, names)))
    return number, names


def _lacks_header(row: Sequence[str], options: ReadOptions) -> bool:
    """Whether the first row is values; a row of one field has another delimiter."""
    return len(row) > 1 and bool(options.names_by_order and options.names_by_order(row))


def read_cells(
    path: Path, stream: io.BufferedReader, form: Format, options: ReadOptions
) -> tuple[str, Iterator[tuple[int, list[str]]]]:
    """Return the delimiter of a table, and the cells of its lines with their numbers.

    The delimiter, unless the options have one, is that which a line `sep=;` names or, of CSV, which
    divides the header into the most columns. Blank lines are left out.
    """
    lines = enumerate(text_lines(path, stream), start=1)
    number, first = next(((number, line) for number, line in lines if line.strip()), (1, ""))
    delimiter = options.delimiter
    if named := _SEP_LINE.fullmatch(first):
        delimiter = delimiter or named[1]
        number, first = next(lines, (number, ""))
    if delimiter is None:
        delimiter = (likely_delimiter(first) or ",") if form == "csv" else "\t"
    csv.field_size_limit(MAX_LINE_BYTES)  # of all readers of the process
    rest = chain([first], (line for _, line in lines))
    cells = _split(first, delimiter)
    if not options.has_quotes:
        rows = ((each, _split(line, delimiter)) for each, line in enumerate(rest, start=number))
        return delimiter, (row for row in rows if row[1] != [""])
    # All fields are quoted, or some, or none.
    if delimiter == "\t" and not all(re.fullmatch(r'".*"', cell) for cell in cells):
        return delimiter, _tab_rows(rest, number, len(cells))
    return delimiter, _rows(path, rest, number, delimiter, advice=options.quotes_advice)


def likely_delimiter(header: str) -> str | None:
    """Return the delimiter that divides a header into the most columns; None if none does."""
    counts = {delimiter: len(_fields(header, delimiter)) for delimiter in _LIKELY}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > 1 else None


def _fields(line: str, delimiter: str) -> list[str]:
    csv.field_size_limit(MAX_LINE_BYTES)  # of all readers of the process
    return next(csv.reader([line.rstrip("\r\n").replace("\r", " ")], delimiter=delimiter), [])


def _split(line: str, delimiter: str = "\t") -> list[str]:
    return line.rstrip("\r\n").split(delimiter)


def _tab_rows(
    lines: Iterator[str], first_number: int, num_columns: int
) -> Iterator[tuple[int, list[str]]]:
    number, ahead = first_number, _Lines(lines)
    for line in ahead:
        cells, num_lines = _split(line), 1
        if any(cell.startswith('"') for cell in cells):
            cells, num_lines = _tab_row(line, ahead, num_columns)
        if cells != [""]:
            yield number, cells
        number += num_lines


class _Lines(Iterator[str]):
    """Lines that can be put back."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self._ahead = lines, deque[str]()

    def __next__(self) -> str:
        return self._ahead.popleft() if self._ahead else next(self._lines)

    def put_back(self, lines: Sequence[str]) -> None:
        self._ahead.extendleft(reversed(lines))


def _tab_row(line: str, ahead: _Lines, num_columns: int) -> tuple[list[str], int]:
    """Return the fields of a row that may be quoted, and of how many lines it is.

    It is quoted if it then has as many fields as the header, and a quoted one that needs to be, for
    a line end, a tab or a quote in it, which is doubled. No quote goes beyond a line where this
    line and the next have the header's number of tabs.
    """
    plain, taken = _split(line), [line]
    following = list(islice(ahead, 1))
    ahead.put_back(following)
    is_whole = num_columns > 1 and all(
        len(_split(each)) == num_columns for each in (line, *following)
    )

    def taking() -> Iterator[str]:
        yield line
        for each in islice(ahead, 0 if is_whole else _MAX_QUOTED_LINES):
            taken.append(each)
            yield each

    cells: list[str] = []
    with suppress(csv.Error):
        cells = next(csv.reader(taking(), delimiter="\t", strict=True), cells)
    is_needed = len(taken) > 1 or len(plain) > num_columns or any(map(_QUOTED.fullmatch, plain))
    if len(cells) == num_columns and is_needed:
        return cells, len(taken)
    ahead.put_back(taken[1:])
    return plain, 1


def _rows(
    path: Path, lines: Iterator[str], first_number: int, delimiter: str, *, advice: str
) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + first_number
        try:
            cells = next(reader, None)
        except csv.Error as error:
            last = reader.line_num + first_number - 1
            raise InvalidInputError(
                f"{path}, line {number}: in line {last} {error}; a quoted field ends at "
                f"its second quote, and quotes in it are doubled{advice}"
            ) from error
        if cells is None:
            return
        if cells:
            yield number, cells
