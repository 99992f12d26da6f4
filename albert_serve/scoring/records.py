"""The rows of a job's input: files in CSV, TSV, JSONL or Parquet, one after another."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

from albert_serve.errors import InvalidInputError, MalformedRequestError, RequestError
from albert_serve.scoring.arrow_values import plain_values
from albert_serve.scoring.errors import ChangedJobError
from albert_serve.tables import (
    DELIMITERS,
    Format,
    TableType,
    csv_rows,
    detect_type,
    is_stream,
    json_rows,
    open_lines,
    parquet_batches,
    parquet_schema,
    repeated_names,
    text_lines,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One row of the input.

    Attributes:
        place: file and line, or row; for messages.
        values: by column; of Parquet, those that the task reads.
        num_bytes: the approximate size of what the task reads, or of what is kept if it is larger.
        position: how many bytes of the input, on disk, end with it.
        is_text: whether all values are text, as those of CSV are.
        error: why the row cannot be read.
        batch: of Parquet, the columns that are kept, of this row and its neighbours.
        index: the row's index in `batch`.
    """

    place: str
    values: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    position: int = 0
    is_text: bool = False
    error: RequestError | None = None
    batch: Any = None
    index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """An input file.

    Attributes:
        columns: the names and types of its columns; types are Arrow's, None for text. None for
            JSONL, whose rows have columns of their own.
        num_rows: of Parquet.
        version: of the content when it was opened; None of a stream.
    """

    path: Path
    type: TableType
    columns: Mapping[str, Any] | None
    has_quotes: bool = True
    num_rows: int = 0
    version: tuple[int, ...] | None = None

    @classmethod
    def open(
        cls, path: Path, chosen: Format | None = None, *, has_quotes: bool = True
    ) -> InputFile:
        """Look at a file's format and columns.

        Raises:
            InvalidInputError: it is damaged, empty, or of a format that is not read.
            OSError: it cannot be read.
        """
        version = _version(path)
        source = cls(
            path=path,
            type=detect_type(path, chosen),
            columns=None,
            has_quotes=has_quotes,
            version=version,
        )
        if source.type.format == "parquet":
            schema, num_rows = parquet_schema(path)
            _check_names(path, schema.names)
            columns = dict(zip(schema.names, schema.types, strict=True))
            return replace(source, columns=columns, num_rows=num_rows)
        if source.type.has_columns and version is not None:
            with open_lines(path, source.type.compression) as (stream, _):
                names = _header(path, _cells(source, text_lines(path, stream)))
            return replace(source, columns=dict.fromkeys(names))
        return source

    @property
    def num_bytes(self) -> int:
        """The size on disk when it was opened; 0 of a stream."""
        return 0 if self.version is None else self.version[2]

    def check_unchanged(self) -> None:
        """Check that the file is the one that was opened.

        Raises:
            ChangedJobError: it was written to, is another one, or is gone.
        """
        if self.version is not None and _version(self.path) != self.version:
            raise ChangedJobError(
                f"{self.path} changed while it was read; score a file that nothing writes to, with "
                "--restart"
            )


def _version(path: Path) -> tuple[int, ...] | None:
    if is_stream(path) or not path.exists():
        return None
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_records(
    sources: Sequence[InputFile],
    fields: Sequence[str],
    keep: Sequence[str] | None,
    num_skipped: int = 0,
) -> Iterator[Record]:
    """Yield the records of several files, in order, after the first so many.

    Args:
        fields: the columns that the task reads, where there are such.
        keep: the columns that are kept; None for all.

    Raises:
        InvalidInputError: a file cannot be read, is damaged or incomplete.
        ChangedJobError: a file is not the one that was opened.
    """
    num_bytes = 0
    for source in sources:
        prefix = f"{source.path}, " if len(sources) > 1 else ""
        try:
            if source.type.format == "parquet":
                read = _parquet_records(source, prefix, num_bytes, fields, keep, num_skipped)
            else:
                read = _line_records(source, prefix, num_bytes, num_skipped)
            num_rows = yield from read
        except InvalidInputError:
            source.check_unchanged()
            raise
        except OSError as error:
            source.check_unchanged()
            reason = error.strerror or error
            raise InvalidInputError(f"{source.path} cannot be read: {reason}") from error
        source.check_unchanged()
        num_skipped = max(0, num_skipped - num_rows)
        num_bytes += source.num_bytes


# Yields the records after those skipped; returns the number of all rows.
_Read: TypeAlias = Generator[Record, None, int]


def _line_records(source: InputFile, prefix: str, num_bytes: int, num_skipped: int) -> _Read:
    number = 0
    with open_lines(source.path, source.type.compression) as (stream, position):
        for number, (line, values, error) in enumerate(_rows(source, stream), start=1):
            if number > num_skipped:
                yield Record(
                    place=f"{prefix}line {line}",
                    values=values,
                    num_bytes=_size(values),
                    position=num_bytes + position(),
                    is_text=source.type.has_columns,
                    error=None if error is None else type(error)(f"{prefix}{error}"),
                )
    return number


def _rows(
    source: InputFile, stream: BufferedReader
) -> Iterator[tuple[int, dict[str, Any], RequestError | None]]:
    if source.type.format == "jsonl":
        yield from json_rows(stream, _strict_json)
        return
    rows = _cells(source, text_lines(source.path, stream))
    names = _header(source.path, rows)
    for line, cells in rows:
        error = None
        if len(cells) != len(names):
            error = MalformedRequestError(
                f"line {line} has {len(cells)} fields; the header has {len(names)}"
            )
        yield line, dict(zip(names, cells, strict=False)), error


def _cells(source: InputFile, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    return csv_rows(
        source.path,
        lines,
        DELIMITERS[source.type.format],
        has_quotes=source.has_quotes,
        advice="; --no-quotes reads quotes as ordinary characters",
    )


def _header(path: Path, rows: Iterator[tuple[int, list[str]]]) -> list[str]:
    _, names = next(rows, (0, []))
    if not names:
        raise InvalidInputError(f"{path} is empty; its first line must name the columns")
    _check_names(path, names)
    return names


def _check_names(path: Path, names: Sequence[str]) -> None:
    if repeated := repeated_names(names):
        raise InvalidInputError(f"{path} has several columns {repeated[0]!r}; rename all but one")


def _strict_json(line: bytes) -> Any:
    return json.loads(line, parse_constant=_refuse, parse_float=_finite)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is out of the range of numbers")
    return number


def _parquet_records(
    source: InputFile,
    prefix: str,
    num_bytes: int,
    fields: Sequence[str],
    keep: Sequence[str] | None,
    num_skipped: int,
) -> _Read:
    names = list(source.columns or ())
    kept = [name for name in names if keep is None or name in keep]
    read = [name for name in names if name in fields]
    columns = [name for name in names if name in {*kept, *read}]
    for start, share, batch in parquet_batches(source.path, columns, num_skipped=num_skipped):
        position = num_bytes + int(source.num_bytes * share)
        yield from records_of(batch, read, kept, f"{prefix}row ", start, position)
    return source.num_rows


def records_of(
    batch: Any,
    fields: Sequence[str],
    keep: Sequence[str],
    place: str,
    number: int,
    position: int = 0,
) -> Iterator[Record]:
    """Yield the rows of an Arrow batch.

    Args:
        place: what precedes a row's number in its place.
        number: the rows before the batch.
        position: of the end of the batch.
    """
    kept = batch.select(keep)
    read = batch.select(fields)
    kept_bytes = kept.nbytes // max(1, batch.num_rows)
    for index in range(batch.num_rows):
        values = plain_values(read, index)
        yield Record(
            place=f"{place}{number + index + 1}",
            values=values,
            num_bytes=max(kept_bytes, _size(values)),
            position=position,
            batch=kept,
            index=index,
        )


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 8
