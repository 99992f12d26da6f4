"""Writers of rows and their answers in CSV, TSV, JSONL and Parquet."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from pydantic_core import to_jsonable_python

from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answers import ColumnType, Result, answer_columns, table_values
from albert_serve.scoring.formats import FileType, compressor, optional_module
from albert_serve.scoring.rows import Row, RowReader
from albert_serve.scoring.sources import Record, Source, plain_values

_DELIMITERS: Final = {"csv": ",", "tsv": "\t"}
# Parts are joined into row groups of at least so many rows.
_ROWS_A_GROUP: Final = 1 << 16
_BYTES_A_GROUP: Final = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The type and the columns of an output.

    Attributes:
        kept: the names of the columns that are kept of the input, and their Arrow types where the
            output is Parquet; None for JSONL, whose rows keep what they have.
    """

    type: FileType
    reader: RowReader
    kept: Mapping[str, Any] | None

    @property
    def columns(self) -> list[str]:
        """The names of a table's columns, in order."""
        return [*(self.kept or ()), *answer_columns(self.reader.task)]

    def schema(self) -> Any:
        """Return the Arrow schema of a table."""
        pa = optional_module("pyarrow", "Parquet")
        answers = answer_columns(self.reader.task)
        fields = [pa.field(name, kind) for name, kind in (self.kept or {}).items()]
        fields += [pa.field(name, arrow_type(kind)) for name, kind in answers.items()]
        return pa.schema(fields)


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


def make_layout(
    kind: FileType,
    reader: RowReader,
    sources: Sequence[Source],
    keep: Sequence[str] | None,
    first: Sequence[Record],
) -> Layout:
    """Return the layout of an output, from the columns of the input.

    Args:
        first: the first records of the input; they decide the columns of JSONL in a table.

    Raises:
        InvalidInputError: the files have different columns, or types of columns, or a column's
            name is not Unicode.
    """
    if not kind.is_table:
        return Layout(type=kind, reader=reader, kept=None)
    known = [source for source in sources if source.columns is not None]
    text = _string() if kind.format == "parquet" else None
    columns: dict[str, Any] = {}
    for source in known:
        kept = {
            name: type_ or text
            for name, type_ in (source.columns or {}).items()
            if keep is None or name in keep
        }
        columns = columns or kept
        _check_same(known[0].path, columns, source.path, kept, needs_types=kind.format == "parquet")
    inferred = len(known) < len(sources)
    if inferred:
        added = [name for record in first for name in reader.kept(record) if name not in columns]
        _check_names(added)
        columns |= dict.fromkeys(added)
    if keep is not None:
        columns = {name: columns.get(name) for name in keep}
    if kind.format == "parquet":
        _check_batches(known, columns)
        columns = {name: type_ or _infer(name, first) for name, type_ in columns.items()}
    return Layout(type=kind, reader=reader, kept=columns)


def _check_same(
    first: Path,
    columns: Mapping[str, Any],
    file: Path,
    others: Mapping[str, Any],
    needs_types: bool,
) -> None:
    if set(columns) != set(others):
        odd = sorted(set(columns) ^ set(others))[0]
        has, lacks = (first, file) if odd in columns else (file, first)
        raise InvalidInputError(
            f"{has} has a column {odd!r} and {lacks} has none; a table has the same columns in all "
            "rows: name those to keep (--keep), or write .jsonl"
        )
    for name in columns if needs_types else ():
        if columns[name] != others[name]:
            raise InvalidInputError(
                f"the column {name!r} is {columns[name]} in {first} and {others[name]} in {file}; "
                "convert it, or leave it out (--keep)"
            )


def _check_names(columns: Sequence[str]) -> None:
    for name in columns:
        if _without_surrogates(name) != name:
            raise InvalidInputError(
                f"the column {name!r} has half a surrogate pair in its name; leave it out (--keep)"
            )


def _check_batches(known: Sequence[Source], columns: Mapping[str, Any]) -> None:
    """Check that batches, whose columns are copied, have those that JSONL adds."""
    for source in known:
        lacking = [name for name in columns if name not in (source.columns or {})]
        if lacking and source.type.format == "parquet":
            raise InvalidInputError(
                f"{source.path} has no column {lacking[0]!r}, which rows of another file have; "
                "name the columns to keep (--keep), or write .jsonl"
            )


def _infer(name: str, records: Sequence[Record]) -> Any:
    pa = optional_module("pyarrow", "Parquet")
    try:
        kind = pa.array([record.values.get(name) for record in records]).type
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidInputError(
            f"the column {name!r} has values of different types ({_first_line(error)}); leave it "
            "out (--keep), or write .jsonl"
        ) from error
    return _string() if pa.types.is_null(kind) else kind


def _string() -> Any:
    return optional_module("pyarrow", "Parquet").string()


def arrow_type(kind: ColumnType) -> Any:
    """Return the Arrow type of a column."""
    pa = optional_module("pyarrow", "Parquet")
    if isinstance(kind, list):
        return pa.list_(arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([pa.field(name, arrow_type(inner)) for name, inner in kind.items()])
    return {
        "string": pa.string(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "float": pa.float32(),
    }[kind]


def json_values(layout: Layout, row: Row, result: Result) -> dict[str, Any]:
    """Return a row of JSONL."""
    return {**_kept_values(layout, row), **result.values}


def _kept_values(layout: Layout, row: Row) -> dict[str, Any]:
    if row.record.batch is None:
        return layout.reader.kept(row.record)
    values = plain_values(row.record.batch, row.record.index)
    plain: dict[str, Any] = to_jsonable_python(
        values, inf_nan_mode="null", bytes_mode="base64", fallback=str
    )
    return plain


class _JsonWriter:
    def __init__(self, raw: BinaryIO, layout: Layout) -> None:
        self._layout = layout
        self._raw = raw
        self._stream = compressor(raw, layout.type.compression)

    def write(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        for row, result in zip(rows, results, strict=True):
            line = json.dumps(
                json_values(self._layout, row, result), ensure_ascii=False, allow_nan=False
            )
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
            kept = _kept_values(self._layout, row)
            _check_known(self._layout, row, kept)
            values = {**kept, **table_values(self._layout.reader.task, result)}
            cells = [_cell(values.get(name)) for name in names]
            lines.append(cells if row.record.is_text else _without_surrogates(cells))
        self._write(lines)
        self._stream.flush()

    def _write(self, lines: Sequence[Sequence[str]]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=_DELIMITERS[self._layout.type.format])
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


def _check_known(layout: Layout, row: Row, kept: Mapping[str, Any]) -> None:
    unknown = [name for name in kept if name not in (layout.kept or {})]
    if unknown:
        raise InvalidInputError(
            f"{row.record.place} has a column {unknown[0]!r}, which none of the first rows has; "
            "name the columns to keep (--keep), or write .jsonl"
        )


class _ParquetWriter:
    def __init__(self, raw: BinaryIO, layout: Layout) -> None:
        pq = optional_module("pyarrow.parquet", "Parquet")
        self._layout = layout
        self._schema = layout.schema()
        self._writer = pq.ParquetWriter(raw, self._schema)

    def write(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        if rows:
            self._writer.write_table(to_table(self._layout, self._schema, rows, results))

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        # Else it would be closed later, when the file is not open any more.
        with contextlib.suppress(OSError):
            self._writer.close()


def to_table(layout: Layout, schema: Any, rows: Sequence[Row], results: Sequence[Result]) -> Any:
    """Return rows and their results as an Arrow table."""
    pa = optional_module("pyarrow", "Parquet")
    kept = pa.concat_tables(_kept_tables(layout, rows)) if layout.kept else None
    columns = list(kept.columns) if kept is not None else []
    answers = [table_values(layout.reader.task, result) for result in results]
    for name in answer_columns(layout.reader.task):
        values = [_without_surrogates(answer.get(name)) for answer in answers]
        columns.append(pa.array(values, schema.field(name).type))
    return pa.Table.from_arrays(columns, schema=schema)


def _kept_tables(layout: Layout, rows: Sequence[Row]) -> Iterator[Any]:
    """Yield the kept columns: slices of the batches that were read, else arrays of values."""
    pa = optional_module("pyarrow", "Parquet")
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
            _check_known(layout, row, of_row)
        arrays = [
            _array(pa, name, kind, members, [of_row.get(name) for of_row in values])
            for name, kind in kept.items()
        ]
        yield pa.Table.from_arrays(arrays, schema=schema)


def _array(pa: Any, name: str, kind: Any, rows: Sequence[Row], values: Sequence[Any]) -> Any:
    try:
        return pa.array([_without_surrogates(value) for value in values], kind)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise InvalidInputError(
            f"between {rows[0].record.place} and {rows[-1].record.place}, the column {name!r} "
            f"holds a value that is not {kind} as in the first rows ({_first_line(error)}); leave "
            "it out (--keep), or write .jsonl"
        ) from error


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str) and not value.isascii():
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_without_surrogates(one) for one in value]
    if isinstance(value, dict):
        return {name: _without_surrogates(one) for name, one in value.items()}
    return value


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


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
    with pq.ParquetWriter(target, layout.schema()) as writer:
        for number, file in enumerate(files, start=1):
            tables.append(pq.read_table(file, partitioning=None))
            is_full = (
                sum(table.num_rows for table in tables) >= _ROWS_A_GROUP
                or sum(table.nbytes for table in tables) >= _BYTES_A_GROUP
            )
            if is_full or number == len(files):
                writer.write_table(pa.concat_tables(tables))
                tables = []
