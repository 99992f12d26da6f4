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
    """An input file of a job.

    Attributes:
        columns: Arrow type of each column, or None for a text column. `columns` is None for JSONL,
            whose rows can have different columns.
        partition: values (pyarrow scalars) of the columns that the file's folders name. They
            replace columns of the file.
        is_guess: whether JSONL is assumed, because the file's name does not show a format.
        num_rows: number of rows in a Parquet or Arrow file, or 0 for other formats.
        version: device, inode, size and modification time when the file was opened, or None for a
            stream.
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
        chosen_format: Format | None = None,
        *,
        has_quotes: bool = True,
        delimiter: str | None = None,
        partition: Mapping[str, Any] | None = None,
    ) -> InputFile:
        """Read a file's format and columns."""
        kind = detect_type(path, chosen_format)
        is_named = chosen_format is not None or has_known_suffix(path)
        version = _version(path)
        options = ReadOptions(delimiter=delimiter, has_quotes=has_quotes, is_strict=True)
        source = cls(
            path=path,
            type=kind,
            options=options,
            partition=partition or {},
            is_guess=kind.format == "jsonl" and not is_named,
            version=version,
        )
        folder_types = {name: value.type for name, value in source.partition.items()}
        if kind.is_columnar:
            schema, num_rows = read_schema(path, kind)
            check_names(path, schema.names)
            columns = dict(zip(schema.names, schema.types, strict=True))
            return replace(source, columns={**columns, **folder_types}, num_rows=num_rows)
        if kind.has_columns and version is not None:
            with open_lines(path, kind.compression) as lines:
                names = open_table(path, lines, kind.format, options).names
            return replace(source, columns={**dict.fromkeys(names), **folder_types})
        return source

    @property
    def num_bytes(self) -> int:
        """The size on disk when the file was opened, or 0 for a stream."""
        return 0 if self.version is None else self.version[2]

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened."""
        if self.version is not None and _version(self.path) != self.version:
            raise ChangedJobError(
                f"{self.path} changed while it was read. Use --restart once nothing writes to it."
            )


def _version(path: Path) -> tuple[int, ...] | None:
    if is_stream(path) or not path.exists():
        return None
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(kw_only=True, slots=True)
class RowBatch:
    """Rows of one input file that are answered and written together.

    Attributes:
        values: values of each row, by column. For Arrow, these are only the columns that the task
            reads, and structures have no null fields.
        locations: file and line (or row number) of each row, for messages. Rows of Arrow have none.
        errors: error of each row that cannot be read, by index.
        is_text: whether all values are text, as in CSV.
        kept_columns: Arrow record batch of the columns that the output keeps, or None if they are
            in `values`.
        position: number of bytes of the input up to the end of the rows.
    """

    values: list[dict[str, Any]] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)
    errors: dict[int, RequestError] = field(default_factory=dict)
    is_text: bool = False
    kept_columns: Any = None
    position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSelection:
    """The columns to read, and the limits of a batch.

    Attributes:
        fields: function from a table's columns to the columns that the task reads.
        keep: columns that the output keeps, or None for all.
        max_rows: maximum number of rows in a batch.
        max_bytes: approximate maximum size of a batch.
    """

    fields: Callable[[Sequence[str]], Collection[str]]
    keep: Sequence[str] | None
    max_rows: int
    max_bytes: int


def read_batches(
    sources: Sequence[InputFile], selection: RowSelection, num_skipped: int = 0
) -> Iterator[RowBatch]:
    """Yield the rows of several files in order, without the first `num_skipped` rows."""
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
        raise InvalidInputError(f"{source.path} cannot be read: {reason}.") from error
    source.check_unchanged()


# A generator that yields the rows that are not skipped, and returns the number of skipped rows.
_Reading: TypeAlias = Generator[RowBatch, None, int]


def _read_lines(
    source: InputFile, selection: RowSelection, prefix: str, num_bytes: int, num_skipped: int
) -> _Reading:
    rows = _rows_of(source, prefix)
    num_skipped_here = sum(1 for _ in islice(rows, num_skipped))
    yield from collect_rows(
        rows, selection, is_text=source.type.has_columns, num_bytes_before=num_bytes
    )
    return num_skipped_here


def _rows_of(source: InputFile, prefix: str) -> Iterator[Row]:
    """Yield the rows of a text file, with the columns that its folders name."""
    folder_values = {name: value.as_py() for name, value in source.partition.items()}
    rows = read_rows(source.path, source.type, source.options, prefix)
    for number, row in enumerate(rows):
        if number == 0 and source.is_guess and isinstance(row.error, MalformedRequestError):
            raise InvalidInputError(
                f"{source.path} does not begin with a JSON object: {row.error} "
                "Name its format, for example with --input-format csv."
            )
        yield row._replace(values={**row.values, **folder_values}) if folder_values else row


def collect_rows(
    rows: Iterable[Row],
    selection: RowSelection,
    *,
    is_text: bool = False,
    num_bytes_before: int = 0,
) -> Iterator[RowBatch]:
    """Yield rows in batches.

    Args:
        num_bytes_before: size of the previous input files in bytes.
    """
    batch, num_bytes = RowBatch(is_text=is_text), 0
    for row in rows:
        if row.error is not None:
            batch.errors[len(batch.values)] = row.error
        batch.locations.append(row.location)
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
    for start, fraction, file_columns in batches:
        batch = file_columns
        for name in columns:
            if (value := source.partition.get(name)) is not None:
                batch = batch.append_column(name, pa.repeat(value, batch.num_rows))
        for rows in arrow_batches(batch, selection, f"{prefix}row ", start):
            rows.position = num_bytes + int(source.num_bytes * fraction)
            yield rows
    return min(num_skipped, source.num_rows)


def arrow_batches(
    batch: Any, selection: RowSelection, prefix: str, num_before: int
) -> Iterator[RowBatch]:
    """Yield the rows of a pyarrow record batch in batches within the limits.

    Args:
        prefix: text before a row's number in its location.
        num_before: number of rows before the record batch.
    """
    names = batch.schema.names
    fields = selection.fields(names)
    batch = _as_text(batch, fields, f"{prefix}{num_before + 1}")
    keep = names if selection.keep is None else selection.keep
    kept_columns = batch.select([name for name in names if name in keep])
    task_columns = batch.select([name for name in names if name in fields])
    num_bytes = max(1, kept_columns.nbytes, task_columns.nbytes)
    num_fitting = selection.max_bytes * batch.num_rows // num_bytes
    step = max(1, min(selection.max_rows, num_fitting))
    for start in range(0, batch.num_rows, step):
        values = [
            {name: _without_nulls(value) for name, value in row.items()}
            for row in plain_rows(task_columns.slice(start, step))
        ]
        yield RowBatch(values=values, kept_columns=kept_columns.slice(start, step))


def _as_text(batch: Any, fields: Collection[str], location: str) -> Any:
    """Return a record batch with the binary columns that the task reads converted to text."""
    for index, column in enumerate(batch.schema):
        if column.name in fields and _is_binary(column.type):
            try:
                text = batch.column(index).cast(pa.string())
            except pa.ArrowInvalid as error:
                raise InvalidInputError(
                    f"{location} or a later row: The binary column {column.name!r} is not UTF-8 "
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
    """Return a value without null fields, which Arrow adds so that all rows have equal fields."""
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(part) for name, part in value.items() if part is not None}
