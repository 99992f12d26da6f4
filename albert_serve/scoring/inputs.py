"""The input of a job: files in CSV, TSV, JSONL, Parquet or Arrow, and their rows in batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from albert_serve.errors import InvalidInputError, MalformedRequestError, RequestError
from albert_serve.scoring.errors import ChangedJobError
from albert_serve.tables import ReadOptions, Row, read_rows
from albert_serve.tables.columnar import plain_rows, read_columns, read_schema
from albert_serve.tables.delimited import open_table
from albert_serve.tables.formats import (
    Format,
    TableType,
    detect_type,
    first_line,
    has_known_suffix,
    is_stream,
    open_lines,
)
from albert_serve.tables.rows import check_names


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """An input file.

    Attributes:
        columns: the names and types of its columns; types are Arrow's, None for text. None for
            JSONL, whose rows have columns of their own.
        partition: the columns that its folders name, in place of its own: scalars of pyarrow.
        is_guess: whether it is read as JSONL because nothing says what it is.
        num_rows: of Parquet and Arrow.
        version: of the content when it was opened; None of a stream.
    """

    path: Path
    type: TableType
    options: ReadOptions
    columns: Mapping[str, Any] | None = None
    partition: Mapping[str, Any] = field(default_factory=dict)
    is_guess: bool = False
    num_rows: int = 0
    version: tuple[int, ...] | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        chosen: Format | None = None,
        *,
        has_quotes: bool = True,
        delimiter: str | None = None,
        partition: Mapping[str, Any] | None = None,
    ) -> InputFile:
        """Look at a file's format and columns."""
        kind = detect_type(path, chosen)
        version = _version(path)
        options = ReadOptions(delimiter=delimiter, has_quotes=has_quotes, is_strict=True)
        source = cls(
            path=path,
            type=kind,
            options=options,
            partition=partition or {},
            is_guess=chosen is None and kind.format == "jsonl" and not has_known_suffix(path),
            version=version,
        )
        by_folder = {name: value.type for name, value in source.partition.items()}
        if kind.is_columnar:
            schema, num_rows = read_schema(path, kind)
            check_names(path, schema.names)
            columns = dict(zip(schema.names, schema.types, strict=True))
            return replace(source, columns={**columns, **by_folder}, num_rows=num_rows)
        if kind.has_columns and version is not None:
            with open_lines(path, kind.compression) as lines:
                names = open_table(path, lines, kind.format, options).names
            return replace(source, columns={**dict.fromkeys(names), **by_folder})
        return source

    @property
    def num_bytes(self) -> int:
        """The size on disk when it was opened; 0 of a stream."""
        return 0 if self.version is None else self.version[2]

    def check_unchanged(self) -> None:
        """Check that the file is the one that was opened."""
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


@dataclass(kw_only=True, slots=True)
class RowBatch:
    """Rows of one input that are answered and written together.

    Attributes:
        values: of each row, by column; of Arrow, those that the task reads, without nulls in them.
        places: of each row, for messages: file and line, or row.
        errors: why rows cannot be read, by their index.
        is_text: whether all values are text, as those of CSV are.
        kept: of Arrow, the columns that the output keeps; None where `values` has them.
        position: how many bytes of the input, on disk, end with the rows.
    """

    values: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    errors: dict[int, RequestError] = field(default_factory=dict)
    is_text: bool = False
    kept: Any = None
    position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSelection:
    """The columns that are read of an input, and the limits of a batch.

    Attributes:
        fields: returns which of a table's columns the task reads.
        keep: the columns that the output keeps; None for all.
        max_bytes: the limit of what a batch holds, approximately.
    """

    fields: Callable[[Sequence[str]], Collection[str]]
    keep: Sequence[str] | None
    max_rows: int
    max_bytes: int


def read_batches(
    sources: Sequence[InputFile], selection: RowSelection, num_skipped: int = 0
) -> Iterator[RowBatch]:
    """Yield the rows of several files, in order, after the first so many."""
    num_bytes = 0
    for source in sources:
        prefix = f"{source.path}, " if len(sources) > 1 else ""
        read = _read_columnar if source.type.is_columnar else _read_lines
        with _checked(source):
            num_skipped -= yield from read(source, selection, prefix, num_bytes, num_skipped)
        num_bytes += source.num_bytes


@contextmanager
def _checked(source: InputFile) -> Iterator[None]:
    try:
        yield
    except InvalidInputError:
        source.check_unchanged()
        raise
    except OSError as error:
        source.check_unchanged()
        reason = error.strerror or error
        raise InvalidInputError(f"{source.path} cannot be read: {reason}") from error
    source.check_unchanged()


# Yields the rows after those that are passed over; returns the number of these.
_Reading: TypeAlias = Generator[RowBatch, None, int]


def _read_lines(
    source: InputFile, selection: RowSelection, prefix: str, num_bytes: int, num_skipped: int
) -> _Reading:
    rows = _rows_of(source, prefix)
    num_passed = sum(1 for _ in islice(rows, num_skipped))
    yield from collect_rows(
        rows, selection, is_text=source.type.has_columns, num_bytes_before=num_bytes
    )
    return num_passed


def _rows_of(source: InputFile, prefix: str) -> Iterator[Row]:
    """Yield the rows of a file of lines, with the columns that its folders name."""
    by_folder = {name: value.as_py() for name, value in source.partition.items()}
    rows = read_rows(source.path, source.type, source.options, prefix)
    for number, row in enumerate(rows):
        if number == 0 and source.is_guess and isinstance(row.error, MalformedRequestError):
            raise InvalidInputError(
                f"{source.path} does not begin with a JSON object: {row.error}. Name its format, "
                "as in --input-format csv."
            )
        yield row._replace(values={**row.values, **by_folder}) if by_folder else row


def collect_rows(
    rows: Iterable[Row],
    selection: RowSelection,
    *,
    is_text: bool = False,
    num_bytes_before: int = 0,
) -> Iterator[RowBatch]:
    """Yield rows in batches.

    Args:
        num_bytes_before: bytes of the input before the file.
    """
    batch, num_bytes = RowBatch(is_text=is_text), 0
    for row in rows:
        if row.error is not None:
            batch.errors[len(batch.values)] = row.error
        batch.places.append(row.place)
        batch.values.append(row.values)
        batch.position = num_bytes_before + row.position
        num_bytes += _size(row.values)
        if len(batch.values) >= selection.max_rows or num_bytes >= selection.max_bytes:
            yield batch
            batch, num_bytes = RowBatch(is_text=is_text), 0
    if batch.values:
        yield batch


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 8


def _read_columnar(
    source: InputFile, selection: RowSelection, prefix: str, num_bytes: int, num_skipped: int
) -> _Reading:
    names = list(source.columns or ())
    keep = names if selection.keep is None else selection.keep
    fields = selection.fields(names)
    columns = [name for name in names if name in keep or name in fields]
    batches = read_columns(
        source.path,
        source.type,
        [name for name in columns if name not in source.partition],
        max_rows=selection.max_rows,
        max_bytes=selection.max_bytes,
        num_skipped=num_skipped,
    )
    for start, share, of_file in batches:
        batch = of_file
        for name in columns:
            if (value := source.partition.get(name)) is not None:
                batch = batch.append_column(name, pa.repeat(value, batch.num_rows))
        for rows in arrow_batches(batch, selection, f"{prefix}row ", start):
            rows.position = num_bytes + int(source.num_bytes * share)
            yield rows
    return min(num_skipped, source.num_rows)


def arrow_batches(
    batch: Any, selection: RowSelection, place: str, num_before: int
) -> Iterator[RowBatch]:
    """Yield a record batch of pyarrow within the limits of a batch.

    Args:
        place: what precedes a row's number in its place.
        num_before: the rows before the batch.
    """
    names = batch.schema.names
    fields = selection.fields(names)
    batch = _as_text(batch, fields, f"{place}{num_before + 1}")
    kept = batch.select([n for n in names if selection.keep is None or n in selection.keep])
    read = batch.select([name for name in names if name in fields])
    num_bytes = max(1, kept.nbytes, read.nbytes)
    num_fitting = selection.max_bytes * batch.num_rows // num_bytes
    step = max(1, min(selection.max_rows, num_fitting))
    for start in range(0, batch.num_rows, step):
        values = [
            {name: _without_nulls(value) for name, value in row.items()}
            for row in plain_rows(read.slice(start, step))
        ]
        first = num_before + start + 1
        places = [f"{place}{number}" for number in range(first, first + len(values))]
        yield RowBatch(values=values, places=places, kept=kept.slice(start, step))


def _as_text(batch: Any, fields: Collection[str], place: str) -> Any:
    """Return a record batch of pyarrow, whose binary columns that the task reads are text."""
    for index, column in enumerate(batch.schema):
        if column.name in fields and _is_binary(column.type):
            try:
                text = batch.column(index).cast(pa.string())
            except pa.ArrowInvalid as error:
                raise InvalidInputError(
                    f"{place} or a later row: the column {column.name!r} is binary, and not UTF-8 "
                    f"({first_line(error)}). Write it as text."
                ) from error
            batch = batch.set_column(index, column.name, text)
    return batch


def _is_binary(kind: Any) -> bool:
    types = pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(
        (types.is_binary(kind), types.is_large_binary(kind), types.is_fixed_size_binary(kind))
    )


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that are null: a structure has all its fields in a row."""
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(one) for name, one in value.items() if one is not None}
