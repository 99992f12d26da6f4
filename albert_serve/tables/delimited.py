"""CSV and TSV: the delimiter, and rows with their line numbers.

Fields of CSV may be quoted, as in RFC 4180. In TSV, quotes are ordinary characters, as in GLUE's
files, except in fields that are quoted as pandas and Excel do it.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from albert_serve.errors import InvalidInputError, MalformedRequestError
from albert_serve.tables.formats import MAX_LINE_BYTES, Format, Lines, is_utf8
from albert_serve.tables.rows import ReadOptions, Row, check_names

# Written files have these delimiters.
DELIMITERS: Final = {"csv": ",", "tsv": "\t"}
_LIKELY_DELIMITERS: Final = ",;\t|"
# This matches a quoted field that needs its quotes although it has no tab and only one line.
_QUOTED: Final = re.compile(r'""|"(?:[^"]|"")*(?:""|\r)(?:[^"]|"")*"')
# A quoted field of TSV has at most this number of lines.
_MAX_QUOTED_LINES: Final = 1000
# The first line of files for Excel may name the delimiter.
_SEP_LINE: Final = re.compile(r'"?sep=([^\r\n])"?\s*', re.IGNORECASE)


class Table(NamedTuple):
    """An open table.

    Attributes:
        delimiter: delimiter of the fields.
        names: names of the columns.
        header: number of the line that names the columns.
        cells: line number and fields of each other line that is not blank.
        is_strict: whether a row that ends early is an error.
    """

    delimiter: str
    names: Sequence[str]
    header: int
    cells: Iterator[tuple[int, list[str]]]
    is_strict: bool

    def rows(self, prefix: str) -> Iterator[Row]:
        """Yield the rows. `prefix` is the text before the line number in locations."""
        for number, fields in self.cells:
            location, error = f"{prefix}line {number}", None
            num_missing = len(self.names) - len(fields)
            if num_missing < 0 or (num_missing and self.is_strict):
                error = MalformedRequestError(
                    f"{location} has {len(fields)} fields, but the header has {len(self.names)}. "
                    f"If {self.delimiter!r} is not the delimiter, set it with --delimiter."
                )
            values: dict[str, Any] = {} if self.is_strict else dict.fromkeys(self.names)
            values.update(zip(self.names, fields, strict=False))
            yield Row(location, values, error, f"{prefix}line {self.header}")


def open_table(path: Path, lines: Lines, table_format: Format, options: ReadOptions) -> Table:
    """Return a table, whose first row names the columns unless the options do."""
    delimiter, cells = _read_cells(path, lines, table_format, options)
    number, first = next(cells, (1, []))
    if not first:
        raise InvalidInputError(f"{path} is empty. Its first line must name the columns.")
    if not all(map(is_utf8, first)):
        raise InvalidInputError(
            f"{path}: The names of the columns are not UTF-8. Convert the file, for example with "
            "`iconv -f CP1252 -t UTF-8`."
        )
    names: Sequence[str] = first
    # If the row has only one field, the delimiter is probably wrong.
    if len(first) > 1 and options.names_by_order and (ordered := options.names_by_order(first)):
        names, cells = ordered, chain([(number, first)], cells)
    else:
        check_names(path, names if options.is_strict else list(filter(None, names)))
    return Table(delimiter, names, number, cells, options.is_strict)


def _read_cells(
    path: Path, lines: Lines, table_format: Format, options: ReadOptions
) -> tuple[str, Iterator[tuple[int, list[str]]]]:
    """Return the delimiter of a table, and the number and fields of each line that is not blank.

    The delimiter is the option, or that of a first line such as `sep=;`. Otherwise, it is a tab or,
    for CSV, the delimiter that splits the header into the most columns.
    """
    numbered = enumerate(lines.checked(path), start=1)
    number, first = next(((number, line) for number, line in numbered if line.strip()), (1, ""))
    delimiter = options.delimiter
    if match := _SEP_LINE.fullmatch(first):
        delimiter = delimiter or match[1]
        number, first = next(numbered, (number, ""))
    if delimiter is None:
        delimiter = (likely_delimiter(first) or ",") if table_format == "csv" else "\t"
    csv.field_size_limit(MAX_LINE_BYTES)  # applies to all readers of the process
    all_lines = chain([first], (line for _, line in numbered))
    cells = _split(first, delimiter)
    if not options.has_quotes:
        split = (_split(line, delimiter) for line in all_lines)
        return delimiter, (row for row in enumerate(split, start=number) if row[1] != [""])
    # A header of quoted fields means that all fields are quoted.
    if delimiter == "\t" and not all(re.fullmatch(r'".*"', cell) for cell in cells):
        return delimiter, _tab_rows(all_lines, number, len(cells))
    advice = " --no-quotes reads quotes as ordinary characters." if options.is_strict else ""
    return delimiter, _quoted_rows(path, all_lines, number, delimiter, advice)


def likely_delimiter(header: str) -> str | None:
    """Return the delimiter that splits a header into the most columns, or None if it has none."""
    counts = {delimiter: len(_fields(header, delimiter)) for delimiter in _LIKELY_DELIMITERS}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > 1 else None


def _fields(line: str, delimiter: str) -> list[str]:
    csv.field_size_limit(MAX_LINE_BYTES)  # applies to all readers of the process
    return next(csv.reader([line.rstrip("\r\n").replace("\r", " ")], delimiter=delimiter), [])


def _split(line: str, delimiter: str = "\t") -> list[str]:
    return line.rstrip("\r\n").split(delimiter)


def _tab_rows(
    lines: Iterator[str], number: int, num_columns: int
) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of rows whose quotes are ordinary characters, unless a field is quoted.

    A row is quoted if quotes give it as many fields as the header, and one of these fields needs
    its quotes, for a line end, a tab or a doubled quote. A quoted field ends in its line if this
    line and the next have the header's number of tabs.
    """
    ahead: deque[str] = deque()
    while line := ahead.popleft() if ahead else next(lines, ""):
        cells, num_lines = _split(line), 1
        if any(cell.startswith('"') for cell in cells):
            ahead.extend(islice(lines, 0 if ahead else 1))
            neighbours = (line, *islice(ahead, 1))
            is_complete = num_columns > 1 and all(
                len(_split(neighbour)) == num_columns for neighbour in neighbours
            )
            if not is_complete:
                ahead.extend(islice(lines, max(0, _MAX_QUOTED_LINES - len(ahead))))
            reader = csv.reader(
                chain([line], () if is_complete else ahead), delimiter="\t", strict=True
            )
            quoted: list[str] = []
            with suppress(csv.Error):
                quoted = next(reader)
            is_needed = (
                reader.line_num > 1
                or len(cells) > num_columns
                or any(map(_QUOTED.fullmatch, cells))
            )
            if len(quoted) == num_columns and is_needed:
                cells, num_lines = quoted, reader.line_num
        if cells != [""]:
            yield number, cells
        number += num_lines
        for _ in range(num_lines - 1):
            ahead.popleft()


def _quoted_rows(
    path: Path, lines: Iterator[str], first_number: int, delimiter: str, advice: str
) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + first_number
        try:
            cells = next(reader, None)
        except csv.Error as error:
            last = reader.line_num + first_number - 1
            raise InvalidInputError(
                f"{path}, line {number}: In line {last}, {error}. Double the quotes in a quoted "
                f"field.{advice}"
            ) from error
        if cells is None:
            return
        if cells:
            yield number, cells
