"""Write the output: columns of the input and of the answer, in CSV, TSV, JSONL or Parquet."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answering import ScoredPart
from albert_serve.scoring.answers import table_values
from albert_serve.scoring.inputs import InputFile, RowBatch
from albert_serve.scoring.rows import RowReader
from albert_serve.tables.delimited import DELIMITERS
from albert_serve.tables.formats import TableType, compressor, first_line

# Parts are joined into row groups of at least this size.
_GROUP_BYTES: Final = 1 << 26
# Parquet pages may end after this many rows. A page of many wide rows would need much memory.
_PAGE_ROWS: Final = 64

_CONVERSION_ERRORS: Final = (pa.ArrowException, TypeError, OverflowError)

_OTHER_OUTPUT: Final = "Keep other columns (--keep), or write JSONL."

_Write: TypeAlias = Callable[[ScoredPart], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The type and the columns of an output.

    Attributes:
        type: format and compression of the output.
        reader: reader of the input rows.
        kept_types: Arrow type of each input column that the output keeps, or None in CSV and TSV.
            `kept_types` is None for JSONL, whose rows keep their own columns.
    """

    type: TableType
    reader: RowReader
    kept_types: Mapping[str, Any] | None

    @property
    def columns(self) -> list[str]:
        """The names of a table's columns, in order."""
        return [*self._names.values(), *self.reader.answers]

    @property
    def schema(self) -> Any:
        """The Arrow schema of a table."""
        types = {self._names[name]: kind for name, kind in (self.kept_types or {}).items()}
        return pa.schema({**types, **self.reader.answers})

    @property
    def _names(self) -> dict[str, str]:
        return self.reader.output_names(list(self.kept_types or ()))

    def kept_rows(self, batch: RowBatch) -> list[dict[str, Any]]:
        """Return, for each row, the JSON values that the output keeps, by their names in it."""
        rows, names = self.reader.kept_rows(batch), self._names
        renamed = []
        for index, row in enumerate(rows):
            self._check_columns(batch, index, row)
            row_names = self.reader.output_names(list(row)) if self.kept_types is None else names
            renamed.append({row_names[name]: value for name, value in row.items()})
        return renamed

    def prepare(self, batch: RowBatch) -> RowBatch:
        """Return a batch with the Arrow columns that Parquet keeps.

        If a value does not have its column's type, its row gets an error and the value is null.
        """
        is_parquet = self.type.format == "parquet"
        if self.kept_types is None or not is_parquet or batch.kept_columns is not None:
            return batch
        rows, errors, columns = self.reader.kept_rows(batch), dict(batch.errors), []
        for index, row in enumerate(rows):
            self._check_columns(batch, index, row)
        for name, kind in self.kept_types.items():
            column, failures = _to_column([row.get(name) for row in rows], kind)
            columns.append(column)
            for index, reason in failures.items():
                message = (
                    f"{batch.locations[index]}: The column {name!r} has a value that is not {kind} "
                    f"as in the first rows ({reason}). {_OTHER_OUTPUT}"
                )
                errors.setdefault(index, InvalidInputError(message))
        kept_columns = pa.RecordBatch.from_arrays(columns, names=list(self.kept_types))
        return replace(batch, errors=errors, kept_columns=kept_columns)

    def _check_columns(self, batch: RowBatch, index: int, names: Collection[str]) -> None:
        if self.kept_types is None or self.kept_types.keys() >= set(names):
            return
        unknown = next(name for name in names if name not in self.kept_types)
        raise InvalidInputError(
            f"{batch.locations[index]} has a column {unknown!r}, which is not in the first rows. "
            f"{_OTHER_OUTPUT}"
        )


def make_layout(
    kind: TableType,
    reader: RowReader,
    sources: Sequence[InputFile],
    first: Sequence[RowBatch],
) -> Layout:
    """Return the layout of an output, from the columns of the input.

    Args:
        first: first rows of JSONL, which determine its columns.
    """
    if not kind.has_columns:
        return Layout(type=kind, reader=reader, kept_types=None)
    keep = reader.selection.keep
    # The rows of JSONL also have the columns that folders name.
    schemas = [
        pa.schema({name: type_ or pa.string() for name, type_ in source.columns.items()})
        if source.columns is not None
        else pa.schema({name: value.type for name, value in source.partition.items()})
        for source in sources
    ]
    rows = [row for batch in first for row in reader.kept_rows(batch)]
    columns: dict[str, Any] = {name: None for row in rows for name in row}
    columns |= {name: None for schema in schemas for name in schema.names}
    columns = columns if keep is None else dict.fromkeys(keep)
    if kind.format == "parquet":
        columns = {name: _type_of(name, schemas, rows) for name in columns}
    return Layout(type=kind, reader=reader, kept_types=columns)


def _type_of(name: str, schemas: Sequence[Any], rows: Sequence[dict[str, Any]]) -> Any:
    """Return the type of a column in the files that have it, or else the type of its values."""
    fields = [schema.field(name) for schema in schemas if name in schema.names]
    try:
        if fields:
            return pa.unify_schemas([pa.schema([field]) for field in fields]).field(name).type
        kind = pa.array([value for row in rows if _has_type(value := row.get(name))]).type
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidInputError(
            f"The column {name!r} has values of different types ({first_line(error)}). "
            f"{_OTHER_OUTPUT}"
        ) from error
    return pa.string() if pa.types.is_null(kind) else kind


def _has_type(value: Any) -> bool:
    """Return whether Parquet has a type for a value, unlike for {} and very large integers."""
    try:
        return not _is_empty(pa.array([value]).type)
    except (pa.ArrowException, OverflowError):
        return False


def _is_empty(kind: Any) -> bool:
    """Return whether a type is or contains a structure without fields."""
    field_types = [kind.field(index).type for index in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not field_types) or any(map(_is_empty, field_types))


def _to_column(values: Sequence[Any], kind: Any) -> tuple[Any, dict[int, str]]:
    """Return values as an Arrow array, and the reasons why values of another type became null."""
    try:
        return pa.array(values, kind), {}
    except _CONVERSION_ERRORS:
        pass
    column, reasons = list(values), {}
    for index, value in enumerate(values):
        try:
            pa.array([value], kind)
        except _CONVERSION_ERRORS as error:
            column[index], reasons[index] = None, first_line(error)
    return pa.array(column, kind), reasons


@contextmanager
def open_writer(file: BinaryIO, layout: Layout, *, has_header: bool) -> Iterator[_Write]:
    """Open the writer of a layout. The end of the file is written if the block succeeds."""
    if layout.type.format == "parquet":
        # The writer must be closed before its file, also after an error.
        with pq.ParquetWriter(file, layout.schema, write_batch_size=_PAGE_ROWS) as parquet:
            yield lambda part: parquet.write_table(to_table(layout, part))
        return
    stream = compressor(file, layout.type.compression)
    if layout.type.format == "jsonl":
        yield partial(_write_json, stream, layout)
    else:
        if has_header:
            _write_lines(stream, layout, [layout.columns])
        yield partial(_write_csv, stream, layout)
    if stream is not file:
        stream.close()


def json_rows_of(layout: Layout, part: ScoredPart) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSONL: the columns that are kept, and the result."""
    for row, result in zip(layout.kept_rows(part.batch), part.results, strict=True):
        yield {**row, **result.values}


def _write_json(stream: BinaryIO, layout: Layout, part: ScoredPart) -> None:
    for values in json_rows_of(layout, part):
        stream.write(json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    stream.flush()


def _write_csv(stream: BinaryIO, layout: Layout, part: ScoredPart) -> None:
    lines, columns = [], layout.columns
    for row, result in zip(layout.kept_rows(part.batch), part.results, strict=True):
        values = {**row, **table_values(layout.reader.task, result)}
        lines.append([_cell(values.get(name)) for name in columns])
    _write_lines(stream, layout, lines)
    stream.flush()


def _write_lines(stream: BinaryIO, layout: Layout, lines: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=DELIMITERS[layout.type.format])
    for line in lines:
        writer.writerow(line)
        # The writer's line end stays "\r\n", because with "\n" it would not quote cells with "\r".
        content = text.getvalue().removesuffix("\r\n") + "\n"
        stream.write(content.encode())
        text.seek(0)
        text.truncate()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def to_table(layout: Layout, part: ScoredPart) -> Any:
    """Return rows and their results as an Arrow table."""
    columns = _kept_columns(layout, part.batch)
    answers = [table_values(layout.reader.task, result) for result in part.results]
    for name, kind in layout.reader.answers.items():
        columns.append(pa.array([row.get(name) for row in answers], kind))
    return pa.Table.from_arrays(columns, schema=layout.schema)


def _kept_columns(layout: Layout, batch: RowBatch) -> list[Any]:
    columns = layout.prepare(batch).kept_columns
    return [
        columns.column(name).cast(kind)
        if name in columns.schema.names
        else pa.nulls(len(batch.values), kind)
        for name, kind in (layout.kept_types or {}).items()
    ]


def join(files: Sequence[Path], target: BinaryIO, layout: Layout) -> None:
    """Write parts as one file. Only the first part has a header."""
    if layout.type.format == "parquet":
        _join_parquet(files, target, layout)
        return
    for file in files:
        with file.open("rb") as part:
            shutil.copyfileobj(part, target, 1 << 20)


def _join_parquet(files: Sequence[Path], target: BinaryIO, layout: Layout) -> None:
    tables: list[Any] = []
    num_bytes = 0
    with pq.ParquetWriter(target, layout.schema, write_batch_size=_PAGE_ROWS) as writer:
        for number, file in enumerate(files, start=1):
            tables.append(pq.ParquetFile(file).read(use_threads=False))
            num_bytes += tables[-1].nbytes
            if num_bytes >= _GROUP_BYTES or number == len(files):
                writer.write_table(pa.concat_tables(tables))
                tables, num_bytes = [], 0
                pa.default_memory_pool().release_unused()
