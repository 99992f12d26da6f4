"""A row of a data file, and the options for reading rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from albert_serve.errors import InvalidInputError, RequestError
from albert_serve.tables.formats import is_utf8

# A function from a file's first row to its column names, or to nothing if the row is a header.
NamesByOrder: TypeAlias = Callable[[Sequence[str]], Sequence[str]]
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# These surrogates replace bytes that are not UTF-8.
_BYTE: Final = re.compile("[\udc80-\udcff]")


class Row(NamedTuple):
    """A row of a data file.

    Attributes:
        location: file and line or row, for messages.
        values: values by column name.
        error: reason why the row cannot be read, or None if it can be read.
        header: file and line of the column names, or only the file if it has no such line.
        classes: names of the classes 0, 1, ... by column, if the file has such names.
        position: number of bytes on disk up to the end of the row.
    """

    location: str
    values: dict[str, Any]
    error: RequestError | None = None
    header: str = ""
    classes: Mapping[str, Sequence[str]] = MappingProxyType({})
    position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """The options for reading rows.

    Attributes:
        delimiter: delimiter of CSV and TSV, or None to detect it.
        has_quotes: whether quotes can enclose fields. Otherwise, they are ordinary characters.
        names_by_order: function that returns the columns of a CSV or TSV file if it has no header.
        is_strict: whether a row that ends early, a column without a name and a number that JSON
            does not have are errors. Otherwise, their values are None and NaN.
    """

    delimiter: str | None = None
    has_quotes: bool = True
    names_by_order: NamesByOrder | None = None
    is_strict: bool = False


def check_names(file: Path, names: Sequence[str]) -> None:
    """Check that the columns of a file have different names."""
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidInputError(f"{file} has several columns {name!r}. Rename all but one.")


def check_characters(row: Row) -> Row:
    """Return a row in which U+FFFD and an error replace lone surrogates."""
    content = _json(row.values)
    if is_utf8(content):
        return row
    name, value = next(
        (name, text) for name in row.values if not is_utf8(text := _json({name: row.values[name]}))
    )
    fault = "contains half of a surrogate pair, which is not a character."
    if _BYTE.search(value):
        fault = "is not UTF-8. Convert the file, for example with `iconv -f CP1252 -t UTF-8`."
    error = InvalidInputError(f"{row.location}: The column {name!r} {fault}")
    values = json.loads(_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", content))
    return row._replace(values=values, error=row.error or error)


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)
