"""JSON: an object a line, or an array of objects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from albert_serve.errors import BodyTooLargeError, MalformedRequestError
from albert_serve.tables.formats import MAX_LINE_BYTES, Lines
from albert_serve.tables.rows import Row

_MAX_ARRAY_BYTES: Final = 256 << 20


def read_rows(lines: Lines, before: str, *, is_strict: bool) -> Iterator[Row]:
    """Yield the objects of the lines that are not blank, or of an array.

    Args:
        before: precedes the line in places.
        is_strict: whether numbers that JSON does not have are errors.
    """
    loads = _strict_json if is_strict else json.loads
    if lines.beginning.lstrip("\ufeff \t\r\n").startswith("["):
        yield from _array_rows(lines, before, loads)
        return
    for number, line in enumerate(lines.bounded(), start=1):
        place = f"{before}line {number}"
        if line is None:
            message = f"{place} has more than {MAX_LINE_BYTES} bytes; make several rows of it"
            yield Row(place, {}, BodyTooLargeError(message))
        elif number == 1 and line.strip() == "{":
            message = f"{place} begins an object of several lines; write one a row, or an array"
            yield Row(place, {}, MalformedRequestError(message))
            return
        elif line.strip():
            try:
                values = loads(line)
            except (ValueError, RecursionError) as error:
                yield Row(place, {}, MalformedRequestError(f"{place} is not JSON: {error}"))
            else:
                yield _object_row(place, values)


def _array_rows(lines: Lines, before: str, loads: Callable[[str], Any]) -> Iterator[Row]:
    content, place = lines.stream.read(_MAX_ARRAY_BYTES + 1), f"{before}line 1"
    if len(content) > _MAX_ARRAY_BYTES:
        message = (
            f"{place} begins an array of more than {_MAX_ARRAY_BYTES:,} bytes; write JSON lines, "
            "as jq -c '.[]' does"
        )
        yield Row(place, {}, BodyTooLargeError(message))
        return
    try:
        records = loads(content)
    except (ValueError, RecursionError) as error:
        # The file has lines of arrays, or its array is incomplete.
        message = f"{place} is not JSON, or no object: {error}"
        yield Row(place, {}, MalformedRequestError(message))
        return
    for number, values in enumerate(records, start=1):
        yield _object_row(f"{before}record {number}", values)


def _object_row(place: str, values: object) -> Row:
    if isinstance(values, dict):
        return Row(place, values, header=place)
    return Row(place, {}, MalformedRequestError(f"{place} is not a JSON object"))


def _strict_json(line: str) -> Any:
    return json.loads(line, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a JSON number, or out of range")
    return number
