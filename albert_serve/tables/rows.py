"""A row of a data file, and the options of reading rows."""

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

# Maps the first row of a file to the names of its columns; to none if that row is a header.
NamesByOrder: TypeAlias = Callable[[Sequence[str]], Sequence[str]]
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# Those that stand for bytes that are not UTF-8.
_BYTE: Final = re.compile("[\udc80-\udcff]")


class Row(NamedTuple):
    """A row of a data file.

    Attributes:
        place: file and line or row, for messages.
        values: values by column name.
        error: the reason why the row cannot be read; None if it can.
        header: file, and the line that names the columns if there is one.
        classes: names of the classes 0, 1, ... by column, where the file has them.
        position: bytes of the file, on disk, up to the end of the row.
    """

    place: str
    values: dict[str, Any]
    error: RequestError | None = None
    header: str = ""
    classes: Mapping[str, Sequence[str]] = MappingProxyType({})
    position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Options of reading rows.

    Attributes:
        delimiter: delimiter of CSV and TSV; None to detect it.
        has_quotes: False if quotes are ordinary characters.
        names_by_order: returns the column names of CSV and TSV files that may lack a header.
        is_strict: whether a row that ends early, a column without a name and a number that JSON
            does not have are errors. Otherwise, the values are None and NaN.
    """

    delimiter: str | None = None
    has_quotes: bool = True
    names_by_order: NamesByOrder | None = None
    is_strict: bool = False


def check_names(file: Path, names: Sequence[str]) -> None:
    """Check that the columns of a file have different names."""
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidInputError(f"{file} has several columns {name!r}; rename all but one")


def check_characters(row: Row) -> Row:
    """Return a row without lone surrogates; if it had any, with U+FFFD and an error."""
    content = _json(row.values)
    if is_utf8(content):
        return row
    name, wrong = next(
        (name, text) for name in row.values if not is_utf8(text := _json({name: row.values[name]}))
    )
    reason = "holds half of a surrogate pair, which stands for no character"
    if _BYTE.search(wrong):
        reason = "is not UTF-8; convert the file, as iconv -f CP1252 -t UTF-8 does"
    error = InvalidInputError(f"{row.place}: the column {name!r} {reason}")
    values = json.loads(_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", content))
    return row._replace(values=values, error=row.error or error)


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)
