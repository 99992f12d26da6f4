"""The output: its columns, of the input and of the answer, in CSV, TSV, JSONL or Parquet."""

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
_GROUP_ROWS: Final = 1 << 16
_GROUP_BYTES: Final = 1 << 26
# Rows between possible page ends in Parquet; a page of many wide rows would take much memory.
_PAGE_ROWS: Final = 64

_CONVERSION_ERRORS: Final = (pa.ArrowException, TypeError, OverflowError)

_Write: TypeAlias = Callable[[ScoredPart], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The type and the columns of an output.

    Attributes:
        kept: the names of the columns that are kept of the input, and their Arrow types where the
            output is Parquet; None for JSONL, whose rows keep what they have.
    """

    type: TableType
    reader: RowReader
    kept: Mapping[str, Any] | None

    @property
    def columns(self) -> list[str]:
        """The names of a table's columns, in order."""
        return [*self._names.values(), *self.reader.answers]

    @property
    def schema(self) -> Any:
        """The Arrow schema of a table."""
        kept = {self._names[name]: kind for name, kind in (self.kept or {}).items()}
        return pa.schema({**kept, **self.reader.answers})

    @property
    def _names(self) -> dict[str, str]:
        return self.reader.output_names(list(self.kept or ()))

    def kept_rows(self, batch: RowBatch) -> list[dict[str, Any]]:
        """Return the values that are kept of each row, as JSON, by their names in the output."""
        rows, names = self.reader.kept_rows(batch), self._names
        renamed = []
        for place, row in zip(batch.places, rows, strict=True):
            self._check_known(place, row)
            own = self.reader.output_names(list(row)) if self.kept is None else names
            renamed.append({own[name]: value for name, value in row.items()})
        return renamed

    def prepare(self, batch: RowBatch) -> RowBatch:
        """Return a batch with the columns that Parquet keeps.

        A row with a value that is not of its column's type gets an error, and null in its place.
        """
        if self.kept is None or self.type.format != "parquet" or batch.kept is not None:
            return batch
        rows, errors, columns = self.reader.kept_rows(batch), dict(batch.errors), []
        for place, row in zip(batch.places, rows, strict=True):
            self._check_known(place, row)
        for name, kind in self.kept.items():
            column, failures = _to_column([row.get(name) for row in rows], kind)
            columns.append(column)
            for index, reason in failures.items():
                message = (
                    f"{batch.places[index]}: the column {name!r} holds a value that is not {kind} "
                    f"as in the first rows ({reason}); leave it out (--keep), or write .jsonl"
                )
                errors.setdefault(index, InvalidInputError(message))
        kept = pa.RecordBatch.from_arrays(columns, names=list(self.kept))
        return replace(batch, errors=errors, kept=kept)

    def _check_known(self, place: str, names: Collection[str]) -> None:
        if self.kept is None or self.kept.keys() >= set(names):
            return
        unknown = next(name for name in names if name not in self.kept)
        raise InvalidInputError(
            f"{place} has a column {unknown!r}, which none of the first rows has; name the columns "
            "to keep (--keep), or write .jsonl"
        )


def make_layout(
    kind: TableType,
    reader: RowReader,
    sources: Sequence[InputFile],
    first: Sequence[RowBatch],
) -> Layout:
    """Return the layout of an output, from the columns of the input.

    Args:
        first: the first rows, which decide the columns where no file has its own.
    """
    if not kind.has_columns:
        return Layout(type=kind, reader=reader, kept=None)
    keep = reader.selection.keep
    # Rows of JSONL have columns of their own, and those that folders name.
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
    return Layout(type=kind, reader=reader, kept=columns)


def _type_of(name: str, schemas: Sequence[Any], rows: Sequence[dict[str, Any]]) -> Any:
    """Return the type of a column in the files that have it, else of its values in rows."""
    fields = [schema.field(name) for schema in schemas if name in schema.names]
    try:
        if fields:
            return pa.unify_schemas([pa.schema([field]) for field in fields]).field(name).type
        kind = pa.array([value for row in rows if _has_type(value := row.get(name))]).type
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidInputError(
            f"the column {name!r} has values of different types ({first_line(error)}); leave it "
            "out (--keep), or write .jsonl"
        ) from error
    return pa.string() if pa.types.is_null(kind) else kind


def _has_type(value: Any) -> bool:
    """Whether Parquet has a type for a value: not for an empty object, or a very large integer."""
    try:
        return not _is_empty(pa.array([value]).type)
    except (pa.ArrowException, OverflowError):
        return False


def _is_empty(kind: Any) -> bool:
    """Whether a type has a structure without fields in it."""
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not inner) or any(map(_is_empty, inner))


def _to_column(values: Sequence[Any], kind: Any) -> tuple[Any, dict[int, str]]:
    """Return values as a column of a type; null for those that are not of it, with the reasons."""
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
def open_writer(raw: BinaryIO, layout: Layout, *, has_header: bool) -> Iterator[_Write]:
    """Open the writer of a layout; the end is written if the block did not fail."""
    if layout.type.format == "parquet":
        # An incomplete writer is closed here too; later, its file would already be closed.
        with pq.ParquetWriter(raw, layout.schema, write_batch_size=_PAGE_ROWS) as parquet:
            yield lambda part: parquet.write_table(to_table(layout, part))
        return
    stream = compressor(raw, layout.type.compression)
    if layout.type.format == "jsonl":
        yield partial(_write_json, stream, layout)
    else:
        if has_header:
            _write_lines(stream, layout, [layout.columns])
        yield partial(_write_csv, stream, layout)
    if stream is not raw:
        stream.close()


def json_rows_of(layout: Layout, part: ScoredPart) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSONL: the values that are kept, and the result."""
    for kept, result in zip(layout.kept_rows(part.batch), part.results, strict=True):
        yield {**kept, **result.values}


def _write_json(stream: BinaryIO, layout: Layout, part: ScoredPart) -> None:
    for values in json_rows_of(layout, part):
        stream.write(json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    stream.flush()


def _write_csv(stream: BinaryIO, layout: Layout, part: ScoredPart) -> None:
    lines, columns = [], layout.columns
    for kept, result in zip(layout.kept_rows(part.batch), part.results, strict=True):
        values = {**kept, **table_values(layout.reader.task, result)}
        lines.append([_cell(values.get(name)) for name in columns])
    _write_lines(stream, layout, lines)
    stream.flush()


def _write_lines(stream: BinaryIO, layout: Layout, lines: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=DELIMITERS[layout.type.format])
    for line in lines:
        writer.writerow(line)
        # The writer quotes both characters of its own line end.
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
    kept = layout.prepare(batch).kept
    return [
        kept.column(name).cast(kind)
        if name in kept.schema.names
        else pa.nulls(len(batch.values), kind)
        for name, kind in (layout.kept or {}).items()
    ]


def join(files: Sequence[Path], target: BinaryIO, layout: Layout) -> None:
    """Write parts, of which only the first has a header, as one file."""
    if layout.type.format == "parquet":
        _join_parquet(files, target, layout)
        return
    for file in files:
        with file.open("rb") as part:
            shutil.copyfileobj(part, target, 1 << 20)


def _join_parquet(files: Sequence[Path], target: BinaryIO, layout: Layout) -> None:
    tables: list[Any] = []
    with pq.ParquetWriter(target, layout.schema, write_batch_size=_PAGE_ROWS) as writer:
        for number, file in enumerate(files, start=1):
            tables.append(pq.ParquetFile(file).read(use_threads=False))
            is_full = (
                sum(table.num_rows for table in tables) >= _GROUP_ROWS
                or sum(table.nbytes for table in tables) >= _GROUP_BYTES
            )
            if is_full or number == len(files):
                writer.write_table(pa.concat_tables(tables))
                tables = []
                pa.default_memory_pool().release_unused()
