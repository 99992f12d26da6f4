"""CSV and TSV: the delimiter, and rows with the numbers of their lines."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from albert_serve.errors import InvalidInputError
from albert_serve.tables import MAX_LINE_BYTES, Format, text_lines

# Of output.
DELIMITERS: Final = {"csv": ",", "tsv": "\t"}
_LIKELY: Final = ",;\t|"
# The first line of files for Excel, which names the delimiter.
_SEP_LINE: Final = re.compile(r'"?sep=([^\r\n])"?\s*', re.IGNORECASE)


def read_rows(
    path: Path,
    stream: io.BufferedReader,
    form: Format,
    *,
    delimiter: str | None = None,
    has_quotes: bool = True,
    advice: str = "",
) -> tuple[str, Iterator[tuple[int, list[str]]]]:
    """Return the delimiter of a table, and its rows that are not blank with their line numbers.

    Args:
        delimiter: None for that which a line `sep=;` names or, of CSV, which divides the header
            into the most columns.
        has_quotes: whether fields may be quoted as in RFC 4180.
        advice: where the quotes of a row are wrong.

    Raises:
        InvalidInputError: while rows are read, the quotes of one are wrong, so that the next row
            is not known; or a line is too long.
    """
    lines = enumerate(text_lines(path, stream), start=1)
    number, first = next(((number, line) for number, line in lines if line.strip()), (1, ""))
    if named := _SEP_LINE.fullmatch(first):
        delimiter = delimiter or named[1]
        number, first = next(lines, (number, ""))
    if delimiter is None:
        delimiter = (likely_delimiter(first) or ",") if form == "csv" else "\t"
    rest = chain([first], (line for _, line in lines))
    return delimiter, _rows(path, rest, number, delimiter, has_quotes=has_quotes, advice=advice)


def likely_delimiter(header: str) -> str | None:
    """Return the delimiter that divides a header into the most columns; None if none does."""
    counts = {delimiter: len(_fields(header, delimiter)) for delimiter in _LIKELY}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > 1 else None


def _fields(line: str, delimiter: str) -> list[str]:
    csv.field_size_limit(MAX_LINE_BYTES)  # of all readers of the process
    return next(csv.reader([line.rstrip("\r\n").replace("\r", " ")], delimiter=delimiter), [])


def _rows(
    path: Path,
    lines: Iterator[str],
    first_number: int,
    delimiter: str,
    *,
    has_quotes: bool,
    advice: str,
) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(MAX_LINE_BYTES)  # of all readers of the process
    reader = csv.reader(
        lines,
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
        strict=True,
    )
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
