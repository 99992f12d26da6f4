"""A row of a data file, and the options of reading rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from albert_serve.errors import InvalidInputError, RequestError

# Maps the first row of a file to the names of its columns; to none if that row is a header.
NamesByOrder: TypeAlias = Callable[[Sequence[str]], Sequence[str]]
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Row(NamedTuple):
    """A row of a data file.

    Attributes:
        place: file and line or row, for messages.
        values: values by column name.
        error: the reason why the row cannot be read; None if it can.
        header: file, and the line that names the columns.
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
        quotes_advice: end of the message about a row with wrong quotes.
    """

    delimiter: str | None = None
    has_quotes: bool = True
    names_by_order: NamesByOrder | None = None
    is_strict: bool = False
    quotes_advice: str = ""


def check_names(file: Path, names: Sequence[str]) -> None:
    """Check that the columns of a file have different names.

    Raises:
        InvalidInputError: several have the same.
    """
    name, count = max(Counter(names).items(), key=itemgetter(1), default=("", 0))
    if count > 1:
        raise InvalidInputError(f"{file} has several columns {name!r}; rename all but one")


def check_characters(row: Row, *, is_text: bool) -> Row:
    """Return a row without lone surrogates; if it had any, with U+FFFD and an error.

    Args:
        is_text: whether the values are fields of text, in which lone surrogates stand for bytes.
    """
    try:
        json.dumps(row.values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        clean = _without_surrogates(row.values)
        name = next(
            new for old, new in zip(row.values, clean, strict=True) if row.values[old] != clean[new]
        )
        reason = "holds half of a surrogate pair, which stands for no character"
        if is_text:
            reason = "is not UTF-8; convert the file, as iconv -f CP1252 -t UTF-8 does"
        error = InvalidInputError(f"{row.place}: the column {name!r} {reason}")
        return row._replace(values=clean, error=row.error or error)
    return row


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(value[name]) for name in value}
    return value
