"""The columns of an output: those that are kept of the input, and those of the answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic_core import to_jsonable_python

from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answers import ColumnType, answer_columns
from albert_serve.scoring.arrow_values import plain_values
from albert_serve.scoring.records import InputFile, Record
from albert_serve.scoring.rows import Row, RowReader
from albert_serve.tables import TableType, first_line


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
        return [*(self.kept or ()), *answer_columns(self.reader.task)]

    def schema(self) -> Any:
        """Return the Arrow schema of a table."""
        answers = answer_columns(self.reader.task)
        fields = [pa.field(name, kind) for name, kind in (self.kept or {}).items()]
        fields += [pa.field(name, _arrow_type(kind)) for name, kind in answers.items()]
        return pa.schema(fields)

    def kept_values(self, row: Row) -> dict[str, Any]:
        """Return the values of a row's columns that are kept, as JSON."""
        if row.record.batch is None:
            return self.reader.kept(row.record)
        values = plain_values(row.record.batch, row.record.index)
        plain: dict[str, Any] = to_jsonable_python(
            values, inf_nan_mode="null", bytes_mode="base64", fallback=str
        )
        return plain

    def check_known(self, row: Row, kept: Collection[str]) -> None:
        """Check that a table has the columns that are kept of a row.

        Raises:
            InvalidInputError: it has not.
        """
        unknown = [name for name in kept if name not in (self.kept or {})]
        if unknown:
            raise InvalidInputError(
                f"{row.record.place} has a column {unknown[0]!r}, which none of the first rows "
                "has; name the columns to keep (--keep), or write .jsonl"
            )


def make_layout(
    kind: TableType,
    reader: RowReader,
    sources: Sequence[InputFile],
    keep: Sequence[str] | None,
    first: Sequence[Record],
) -> Layout:
    """Return the layout of an output, from the columns of the input.

    Args:
        first: the first records, which decide the columns where no file has its own.

    Raises:
        InvalidInputError: the files have different columns, or types of columns.
    """
    if not kind.has_columns:
        return Layout(type=kind, reader=reader, kept=None)
    is_typed = kind.format == "parquet"
    text = pa.string() if is_typed else None
    known = {
        source.path: {
            name: type_ or text
            for name, type_ in source.columns.items()
            if keep is None or name in keep
        }
        for source in sources
        if source.columns is not None
    }
    columns: dict[str, Any] = dict.fromkeys(
        name for record in first for name in reader.kept(record)
    )
    if known:
        (path, columns), *others = known.items()
        for other_path, other in others:
            _check_same(path, columns, other_path, other, is_typed=is_typed)
    if keep is not None:
        columns = {name: columns.get(name) for name in keep}
    if is_typed:
        columns = {name: type_ or _infer(name, first) for name, type_ in columns.items()}
    return Layout(type=kind, reader=reader, kept=columns)


def _check_same(
    first: Path,
    columns: Mapping[str, Any],
    file: Path,
    others: Mapping[str, Any],
    *,
    is_typed: bool,
) -> None:
    if set(columns) != set(others):
        odd = sorted(set(columns) ^ set(others))[0]
        has, lacks = (first, file) if odd in columns else (file, first)
        raise InvalidInputError(
            f"{has} has a column {odd!r} and {lacks} has none; a table has the same columns in all "
            "rows: name those to keep (--keep), or write .jsonl"
        )
    for name in columns if is_typed else ():
        if columns[name] != others[name]:
            raise InvalidInputError(
                f"the column {name!r} is {columns[name]} in {first} and {others[name]} in {file}; "
                "convert it, or leave it out (--keep)"
            )


def _infer(name: str, records: Sequence[Record]) -> Any:
    try:
        kind = pa.array([record.values.get(name) for record in records]).type
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidInputError(
            f"the column {name!r} has values of different types ({first_line(error)}); leave it "
            "out (--keep), or write .jsonl"
        ) from error
    return pa.string() if pa.types.is_null(kind) else kind


def _arrow_type(kind: ColumnType) -> Any:
    """Return the Arrow type of a column."""
    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([pa.field(name, _arrow_type(inner)) for name, inner in kind.items()])
    return {
        "string": pa.string(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "float": pa.float32(),
    }[kind]


def without_surrogates(value: Any) -> Any:
    """Return a value whose text can be written as UTF-8: half a surrogate pair becomes "?"."""
    if isinstance(value, str) and not value.isascii():
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [without_surrogates(one) for one in value]
    if isinstance(value, dict):
        return {name: without_surrogates(one) for name, one in value.items()}
    return value
