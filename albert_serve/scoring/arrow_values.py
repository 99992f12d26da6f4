"""Values of Arrow as values of Python; those in nanoseconds, which Python lacks, as ISO 8601."""

from __future__ import annotations

import functools
from typing import Any, Final

import pyarrow as pa

from albert_serve.errors import InvalidInputError

_NS_PER_S: Final = 10**9


def plain_values(batch: Any, index: int) -> dict[str, Any]:
    """Return a row of Arrow as values of Python.

    Times and durations of types in nanoseconds are text with nine decimals, whatever the value,
    also in lists and structures: 1970-01-01T00:00:00.000001000, PT0.000001000S.

    Raises:
        InvalidInputError: a list or structure holds text that is not UTF-8.
    """
    return {
        name: _as_python(name, column[index])
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


def _as_python(name: str, scalar: Any) -> Any:
    try:
        return _with_nanoseconds(scalar) if _has_nanoseconds(scalar.type) else scalar.as_py()
    except UnicodeDecodeError as error:
        if not hasattr(scalar, "as_buffer"):
            raise InvalidInputError(
                f"the column {name!r} holds text that is not UTF-8; is the file damaged?"
            ) from error
        # As in CSV: lone surrogates, which no task takes.
        return scalar.as_buffer().to_pybytes().decode("utf-8", errors="surrogateescape")


@functools.lru_cache(maxsize=1024)
def _has_nanoseconds(kind: Any) -> bool:
    """Whether a type is in nanoseconds, or has values of such a type inside."""
    if getattr(kind, "unit", "") == "ns":
        return True
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    inner += [getattr(kind, name) for name in ("value_type", "storage_type") if hasattr(kind, name)]
    return any(map(_has_nanoseconds, inner))


def _with_nanoseconds(scalar: Any) -> Any:
    if not scalar.is_valid:
        return None
    if not _has_nanoseconds(scalar.type):
        return scalar.as_py()
    if isinstance(scalar, pa.TimestampScalar):
        return _timestamp(scalar)
    if isinstance(scalar, pa.DurationScalar):
        seconds, rest = divmod(abs(scalar.value), _NS_PER_S)
        return f"{'-' if scalar.value < 0 else ''}PT{seconds}.{rest:09}S"
    if isinstance(scalar, pa.Time64Scalar):
        return scalar.cast(pa.string()).as_py()
    if isinstance(scalar, pa.MapScalar):
        return [[_with_nanoseconds(part) for part in pair.values()] for pair in scalar.values]
    if isinstance(scalar, pa.StructScalar):
        names = [field.name for field in scalar.type]
        return {name: _with_nanoseconds(scalar[number]) for number, name in enumerate(names)}
    if isinstance(scalar, pa.ListScalar):
        return [_with_nanoseconds(one) for one in scalar.values]
    return _with_nanoseconds(scalar.value)  # of a dictionary, an extension or a union


def _timestamp(scalar: Any) -> str:
    text: str = scalar.cast(pa.string()).as_py().replace(" ", "T")
    if scalar.type.tz in (None, "UTC"):
        return text
    return f"{text[:-2]}:{text[-2:]}"  # +01:00 of Arrow's +0100
