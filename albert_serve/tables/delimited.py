"""CSV and TSV: the delimiter, and rows with the numbers of their lines.

Fields of CSV may be quoted, as in RFC 4180. Of text between tabs, quotes are ordinary characters,
as in GLUE's files, but where they make a field as pandas and Excel write it.
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

# Output is written with these.
DELIMITERS: Final = {"csv": ",", "tsv": "\t"}
_LIKELY: Final = ",;\t|"
# A field in quotes that needs them, in one line and without tabs.
_QUOTED: Final = re.compile(r'""|"(?:[^"]|"")*(?:""|\r)(?:[^"]|"")*"')
# A quoted field of a file with tabs has at most so many lines.
_MAX_QUOTED_LINES: Final = 1000
# The first line of files for Excel, which names the delimiter.
_SEP_LINE: Final = re.compile(r'"?sep=([^\r\n])"?\s*', re.IGNORECASE)


class Table(NamedTuple):
    """An open table.

    Attributes:
        names: of its columns.
        header: the number of the line that names them.
        cells: of the other lines that are not blank, with the numbers of these.
    """

    delimiter: str
    names: Sequence[str]
    header: int
    cells: Iterator[tuple[int, list[str]]]
    is_strict: bool

    def rows(self, before: str) -> Iterator[Row]:
        """Yield the rows; `before` precedes the line in places."""
        for number, fields in self.cells:
            place, error = f"{before}line {number}", None
            num_missing = len(self.names) - len(fields)
            if num_missing < 0 or (num_missing and self.is_strict):
                error = MalformedRequestError(
                    f"{place} has {len(fields)} fields; the header has {len(self.names)} "
                    f"(delimiter {self.delimiter!r}; --delimiter sets another)"
                )
            values: dict[str, Any] = {} if self.is_strict else dict.fromkeys(self.names)
            values.update(zip(self.names, fields, strict=False))
            yield Row(place, values, error, f"{before}line {self.header}")


def open_table(path: Path, lines: Lines, form: Format, options: ReadOptions) -> Table:
    """Return a table, whose first row names its columns unless the options have their names."""
    delimiter, cells = _read_cells(path, lines, form, options)
    number, first = next(cells, (1, []))
    if not first:
        raise InvalidInputError(f"{path} is empty; its first line must name the columns")
    if not all(map(is_utf8, first)):
        raise InvalidInputError(
            f"{path}: the names of its columns are not UTF-8; convert the file, as iconv -f CP1252 "
            "-t UTF-8 does"
        )
    names: Sequence[str] = first
    # A row of one field has another delimiter.
    if len(first) > 1 and options.names_by_order and (own := options.names_by_order(first)):
        names, cells = own, chain([(number, first)], cells)
    else:
        check_names(path, names if options.is_strict else list(filter(None, names)))
    return Table(delimiter, names, number, cells, options.is_strict)


def _read_cells(
    path: Path, lines: Lines, form: Format, options: ReadOptions
) -> tuple[str, Iterator[tuple[int, list[str]]]]:
    """Return the delimiter of a table, and the cells of its lines with their numbers.

    The delimiter, unless the options have one, is that which a line `sep=;` names or, of CSV, which
    divides the header into the most columns. Blank lines are left out.
    """
    numbered = enumerate(lines.checked(path), start=1)
    number, first = next(((number, line) for number, line in numbered if line.strip()), (1, ""))
    delimiter = options.delimiter
    if named := _SEP_LINE.fullmatch(first):
        delimiter = delimiter or named[1]
        number, first = next(numbered, (number, ""))
    if delimiter is None:
        delimiter = (likely_delimiter(first) or ",") if form == "csv" else "\t"
    csv.field_size_limit(MAX_LINE_BYTES)  # of all readers of the process
    rest = chain([first], (line for _, line in numbered))
    cells = _split(first, delimiter)
    if not options.has_quotes:
        rows = ((each, _split(line, delimiter)) for each, line in enumerate(rest, start=number))
        return delimiter, (row for row in rows if row[1] != [""])
    # All fields are quoted, or some, or none.
    if delimiter == "\t" and not all(re.fullmatch(r'".*"', cell) for cell in cells):
        return delimiter, _tab_rows(rest, number, len(cells))
    advice = "; --no-quotes reads quotes as ordinary characters" if options.is_strict else ""
    return delimiter, _quoted_rows(path, rest, number, delimiter, advice)


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
    lines: Iterator[str], number: int, num_columns: int
) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of rows whose quotes are ordinary characters, unless a field is quoted.

    A row is quoted if it then has as many fields as the header, and a quoted one that needs to be,
    for a line end, a tab or a quote in it, which is doubled. No quote goes beyond a line where this
    line and the next have the header's number of tabs.
    """
    ahead: deque[str] = deque()
    while line := ahead.popleft() if ahead else next(lines, ""):
        cells, num_lines = _split(line), 1
        if any(cell.startswith('"') for cell in cells):
            ahead.extend(islice(lines, 0 if ahead else 1))
            neighbours = (line, *islice(ahead, 1))
            is_whole = num_columns > 1 and all(len(_split(it)) == num_columns for it in neighbours)
            if not is_whole:
                ahead.extend(islice(lines, max(0, _MAX_QUOTED_LINES - len(ahead))))
            reader = csv.reader(
                chain([line], () if is_whole else ahead), delimiter="\t", strict=True
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
                f"{path}, line {number}: in line {last} {error}; a quoted field ends at "
                f"its second quote, and quotes in it are doubled{advice}"
            ) from error
        if cells is None:
            return
        if cells:
            yield number, cells
