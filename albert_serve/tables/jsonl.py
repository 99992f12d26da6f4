"""JSON: one object per line, or an array of objects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from albert_serve.errors import BodyTooLargeError, MalformedRequestError
from albert_serve.tables.formats import MAX_LINE_BYTES, Lines
from albert_serve.tables.rows import Row

_MAX_ARRAY_BYTES: Final = 256 << 20


def read_rows(lines: Lines, prefix: str, *, is_strict: bool) -> Iterator[Row]:
    """Yield the objects of the lines that are not blank, or of an array.

    Args:
        lines: lines of the file.
        prefix: text before the line number in locations.
        is_strict: whether numbers that JSON does not have are errors.
    """
    loads = _strict_json if is_strict else json.loads
    if lines.beginning.lstrip("\ufeff \t\r\n").startswith("["):
        yield from _array_rows(lines, prefix, loads)
        return
    for number, line in enumerate(lines.bounded(), start=1):
        location = f"{prefix}line {number}"
        if line is None:
            message = (
                f"{location} has more than {MAX_LINE_BYTES} bytes. Split it into several rows."
            )
            yield Row(location, {}, BodyTooLargeError(message))
        elif number == 1 and line.strip() == "{":
            message = (
                f"{location} begins an object of several lines. Write one object per line, or an "
                "array."
            )
            yield Row(location, {}, MalformedRequestError(message))
            return
        elif line.strip():
            try:
                values = loads(line)
            except (ValueError, RecursionError) as error:
                yield Row(location, {}, MalformedRequestError(f"{location} is not JSON: {error}."))
            else:
                yield _object_row(location, values)


def _array_rows(lines: Lines, prefix: str, loads: Callable[[str], Any]) -> Iterator[Row]:
    content, location = lines.stream.read(_MAX_ARRAY_BYTES + 1), f"{prefix}line 1"
    if len(content) > _MAX_ARRAY_BYTES:
        message = (
            f"{location} begins an array of more than {_MAX_ARRAY_BYTES:,} bytes. Write JSON "
            "lines, for example with jq -c '.[]'."
        )
        yield Row(location, {}, BodyTooLargeError(message))
        return
    try:
        records = loads(content)
    except (ValueError, RecursionError) as error:
        # Either each line is an array, or the file's array is incomplete.
        message = f"{location} is not JSON, or not an object: {error}."
        yield Row(location, {}, MalformedRequestError(message))
        return
    for number, values in enumerate(records, start=1):
        yield _object_row(f"{prefix}record {number}", values)


def _object_row(location: str, values: object) -> Row:
    if isinstance(values, dict):
        return Row(location, values, header=location)
    return Row(location, {}, MalformedRequestError(f"{location} is not a JSON object."))


def _strict_json(line: str) -> Any:
    return json.loads(line, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a JSON number, or out of range")
    return number
