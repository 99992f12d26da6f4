"""Writers of rows and their answers in CSV, TSV, JSONL and Parquet."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from albert_serve.scoring.answers import Result, table_values
from albert_serve.scoring.formats import (
    DELIMITERS,
    compressor,
    optional_module,
    release_arrow_memory,
)
from albert_serve.scoring.output.layout import Layout, without_surrogates
from albert_serve.scoring.output.tables import to_table
from albert_serve.scoring.rows import Row

# Parts are joined into row groups of at least so many rows.
_ROWS_A_GROUP: Final = 1 << 16
_BYTES_A_GROUP: Final = 1 << 26
# Pages of Parquet end at multiples of so many rows; with wide rows, more would be much memory.
_PAGE_ROWS: Final = 64


class Writer(Protocol):
    """Writes rows into a stream, which it leaves open."""

    def write(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        """Write rows and their results."""
        ...

    def close(self) -> None:
        """Write the end."""
        ...

    def abort(self) -> None:
        """Release what an output that is not complete holds."""
        ...


@contextmanager
def open_writer(
    raw: BinaryIO,
    layout: Layout,
    *,
    has_header: bool,
    ending: AbstractContextManager[None] | None = None,
) -> Iterator[Writer]:
    """Open the writer of a layout; the end is written, in `ending`, if the block did not fail."""
    writer = _writer(raw, layout, has_header=has_header)
    try:
        yield writer
    except BaseException:
        writer.abort()
        raise
    with ending or nullcontext():
        writer.close()


def _writer(raw: BinaryIO, layout: Layout, *, has_header: bool) -> Writer:
    if layout.type.format == "parquet":
        return _ParquetWriter(raw, layout)
    if layout.type.format == "jsonl":
        return _JsonWriter(raw, layout)
    return _CsvWriter(raw, layout, has_header=has_header)


class _JsonWriter:
    def __init__(self, raw: BinaryIO, layout: Layout) -> None:
        self._layout = layout
        self._raw = raw
        self._stream = compressor(raw, layout.type.compression)

    def write(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        for row, result in zip(rows, results, strict=True):
            values = self._layout.json_values(row, result)
            line = json.dumps(values, ensure_ascii=False, allow_nan=False)
            # A lone surrogate, which a value may hold, is written as its JSON escape.
            self._stream.write(line.encode(errors="backslashreplace") + b"\n")
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not self._raw:
            self._stream.close()

    def abort(self) -> None:
        """Leave the stream without its end."""


class _CsvWriter:
    def __init__(self, raw: BinaryIO, layout: Layout, *, has_header: bool) -> None:
        self._layout = layout
        self._raw = raw
        self._stream = compressor(raw, layout.type.compression)
        if has_header:
            self._write([layout.columns])

    def write(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        names = self._layout.columns
        lines = []
        for row, result in zip(rows, results, strict=True):
            kept = self._layout.kept_values(row)
            self._layout.check_known(row, kept)
            values = {**kept, **table_values(self._layout.reader.task, result)}
            cells = [_cell(values.get(name)) for name in names]
            lines.append(cells if row.record.is_text else without_surrogates(cells))
        self._write(lines)
        self._stream.flush()

    def _write(self, lines: Sequence[Sequence[str]]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=DELIMITERS[self._layout.type.format])
        content = []
        for line in lines:
            writer.writerow(line)
            # The writer quotes both characters of its own line end.
            content.append(text.getvalue().removesuffix("\r\n") + "\n")
            text.seek(0)
            text.truncate()
        # Bytes that were not UTF-8 are written as they were read.
        self._stream.write("".join(content).encode(errors="surrogateescape"))

    def close(self) -> None:
        if self._stream is not self._raw:
            self._stream.close()

    def abort(self) -> None:
        """Leave the stream without its end."""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


class _ParquetWriter:
    def __init__(self, raw: BinaryIO, layout: Layout) -> None:
        pq = optional_module("pyarrow.parquet", "Parquet")
        self._layout = layout
        self._schema = layout.schema()
        self._writer = pq.ParquetWriter(raw, self._schema, write_batch_size=_PAGE_ROWS)

    def write(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        if rows:
            self._writer.write_table(to_table(self._layout, self._schema, rows, results))

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        # Else it would be closed later, when the file is not open any more.
        with contextlib.suppress(OSError):
            self._writer.close()


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
    pa = optional_module("pyarrow", "Parquet")
    pq = optional_module("pyarrow.parquet", "Parquet")
    tables: list[Any] = []
    with pq.ParquetWriter(target, layout.schema(), write_batch_size=_PAGE_ROWS) as writer:
        for number, file in enumerate(files, start=1):
            tables.append(pq.ParquetFile(file).read(use_threads=False))
            is_full = (
                sum(table.num_rows for table in tables) >= _ROWS_A_GROUP
                or sum(table.nbytes for table in tables) >= _BYTES_A_GROUP
            )
            if is_full or number == len(files):
                writer.write_table(pa.concat_tables(tables))
                tables = []
                release_arrow_memory()
