"""Writers of rows and their answers in CSV, TSV, JSONL and Parquet."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answers import RowResult, answer_columns, table_values
from albert_serve.scoring.output.layout import Layout, without_surrogates
from albert_serve.scoring.rows import Row
from albert_serve.tables import DELIMITERS, compressor, first_line

# Parts are joined into row groups of at least so many rows.
_GROUP_ROWS: Final = 1 << 16
_GROUP_BYTES: Final = 1 << 26
# Pages of Parquet end at multiples of so many rows; with wide rows, more would be much memory.
_PAGE_ROWS: Final = 64


@contextmanager
def open_writer(raw: BinaryIO, layout: Layout, *, has_header: bool) -> Iterator[_Writer]:
    """Open the writer of a layout; the end is written if the block did not fail."""
    if layout.type.format == "parquet":
        schema = layout.schema()
        # What is not complete is closed, too: else it would be later, when the file is not open.
        with pq.ParquetWriter(raw, schema, write_batch_size=_PAGE_ROWS) as parquet:
            yield _ParquetWriter(parquet, layout, schema)
        return
    stream = compressor(raw, layout.type.compression)
    yield (
        _JsonWriter(stream, layout)
        if layout.type.format == "jsonl"
        else _CsvWriter(stream, layout, has_header=has_header)
    )
    if stream is not raw:
        stream.close()


class _Writer(Protocol):
    """Writes rows into a stream."""

    def write(self, rows: Sequence[Row], results: Sequence[RowResult]) -> None:
        """Write rows and their results."""
        ...


class _JsonWriter:
    def __init__(self, stream: BinaryIO, layout: Layout) -> None:
        self._stream = stream
        self._layout = layout

    def write(self, rows: Sequence[Row], results: Sequence[RowResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            values = {**self._layout.kept_values(row), **result.values}
            line = json.dumps(values, ensure_ascii=False, allow_nan=False)
            # A lone surrogate, which a value may hold, is written as its JSON escape.
            self._stream.write(line.encode(errors="backslashreplace") + b"\n")
        self._stream.flush()


class _CsvWriter:
    def __init__(self, stream: BinaryIO, layout: Layout, *, has_header: bool) -> None:
        self._stream = stream
        self._layout = layout
        if has_header:
            self._write([layout.columns])

    def write(self, rows: Sequence[Row], results: Sequence[RowResult]) -> None:
        lines = []
        for row, result in zip(rows, results, strict=True):
            kept = self._layout.kept_values(row)
            self._layout.check_known(row, kept)
            values = {**kept, **table_values(self._layout.reader.task, result)}
            cells = [_cell(values.get(name)) for name in self._layout.columns]
            lines.append(cells if row.record.is_text else without_surrogates(cells))
        self._write(lines)
        self._stream.flush()

    def _write(self, lines: Sequence[Sequence[str]]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=DELIMITERS[self._layout.type.format])
        for line in lines:
            writer.writerow(line)
            # The writer quotes both characters of its own line end.
            content = text.getvalue().removesuffix("\r\n") + "\n"
            # Bytes that were not UTF-8 are written as they were read.
            self._stream.write(content.encode(errors="surrogateescape"))
            text.seek(0)
            text.truncate()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class _ParquetWriter:
    def __init__(self, writer: Any, layout: Layout, schema: Any) -> None:
        self._writer = writer
        self._layout = layout
        self._schema = schema

    def write(self, rows: Sequence[Row], results: Sequence[RowResult]) -> None:
        if rows:
            self._writer.write_table(to_table(self._layout, self._schema, rows, results))


def to_table(layout: Layout, schema: Any, rows: Sequence[Row], results: Sequence[RowResult]) -> Any:
    """Return rows and their results as an Arrow table."""
    kept = pa.concat_tables(_kept_tables(layout, rows)) if layout.kept else None
    columns = list(kept.columns) if kept is not None else []
    answers = [table_values(layout.reader.task, result) for result in results]
    for name in answer_columns(layout.reader.task):
        values = [without_surrogates(answer.get(name)) for answer in answers]
        columns.append(pa.array(values, schema.field(name).type))
    return pa.Table.from_arrays(columns, schema=schema)


def _kept_tables(layout: Layout, rows: Sequence[Row]) -> Iterator[Any]:
    """Yield the kept columns: slices of the batches that were read, else arrays of values."""
    kept = layout.kept or {}
    schema = pa.schema([pa.field(name, kind) for name, kind in kept.items()])
    for _, group in groupby(rows, key=lambda row: id(row.record.batch)):
        members = list(group)
        first = members[0].record
        if first.batch is not None:
            batch = first.batch.select(list(kept)).slice(first.index, len(members))
            yield pa.Table.from_batches([batch]).cast(schema)
            continue
        values = [layout.reader.kept(row.record) for row in members]
        for row, of_row in zip(members, values, strict=True):
            layout.check_known(row, of_row)
        arrays = [
            _array(name, kind, members, [of_row.get(name) for of_row in values])
            for name, kind in kept.items()
        ]
        yield pa.Table.from_arrays(arrays, schema=schema)


def _array(name: str, kind: Any, rows: Sequence[Row], values: Sequence[Any]) -> Any:
    try:
        return pa.array([without_surrogates(value) for value in values], kind)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise InvalidInputError(
            f"between {rows[0].record.place} and {rows[-1].record.place}, the column {name!r} "
            f"holds a value that is not {kind} as in the first rows ({first_line(error)}); leave "
            "it out (--keep), or write .jsonl"
        ) from error


def join(files: Sequence[Path], target: BinaryIO, layout: Layout) -> None:
    """Write parts, of which only the first has a header, as one file.

    Raises:
        OSError: a part cannot be read, or the file cannot be written.
    """
    if layout.type.format == "parquet":
        _join_parquet(files, target, layout)
        return
    for file in files:
        with file.open("rb") as part:
            shutil.copyfileobj(part, target, 1 << 20)


def _join_parquet(files: Sequence[Path], target: BinaryIO, layout: Layout) -> None:
    tables: list[Any] = []
    with pq.ParquetWriter(target, layout.schema(), write_batch_size=_PAGE_ROWS) as writer:
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
