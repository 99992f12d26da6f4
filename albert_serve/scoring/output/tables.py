"""Rows and their answers as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answers import Result, answer_columns, table_values
from albert_serve.scoring.errors import first_line
from albert_serve.scoring.formats import optional_module
from albert_serve.scoring.output.layout import Layout, without_surrogates
from albert_serve.scoring.rows import Row


def to_table(layout: Layout, schema: Any, rows: Sequence[Row], results: Sequence[Result]) -> Any:
    """Return rows and their results as an Arrow table."""
    pa = optional_module("pyarrow", "Parquet")
    kept = pa.concat_tables(_kept_tables(layout, rows)) if layout.kept else None
    columns = list(kept.columns) if kept is not None else []
    answers = [table_values(layout.reader.task, result) for result in results]
    for name in answer_columns(layout.reader.task):
        values = [without_surrogates(answer.get(name)) for answer in answers]
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
            layout.check_known(row, of_row)
        arrays = [
            _array(pa, name, kind, members, [of_row.get(name) for of_row in values])
            for name, kind in kept.items()
        ]
        yield pa.Table.from_arrays(arrays, schema=schema)


def _array(pa: Any, name: str, kind: Any, rows: Sequence[Row], values: Sequence[Any]) -> Any:
    try:
        return pa.array([without_surrogates(value) for value in values], kind)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise InvalidInputError(
            f"between {rows[0].record.place} and {rows[-1].record.place}, the column {name!r} "
            f"holds a value that is not {kind} as in the first rows ({first_line(error)}); leave "
            "it out (--keep), or write .jsonl"
        ) from error
