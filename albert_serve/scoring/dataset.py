"""Lazy scoring of tables and iterables in memory.

scorer = LocalScorer.open("models/albert-small-en", "text-classification")
for row in score_dataset(({"text": line} for line in lines), scorer):
    print(row["output"])
parquet.write_table(score_dataset(dataset, scorer).read_all(), "scored.parquet")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answering import Scorer, answer_batches, check_head
from albert_serve.scoring.inputs import RowBatch, RowSelection, arrow_batches, collect_rows
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.output import Layout, json_rows_of, to_table
from albert_serve.scoring.rows import RowReader
from albert_serve.tables import Row
from albert_serve.tables.formats import TableType


def score_dataset(data: Any, scorer: Scorer, options: ScoreOptions | None = None) -> Any:
    """Return the rows with their answers, which are computed while the result is read.

    Args:
        data: iterable of texts or dictionaries, or a table. A table is a pyarrow dataset, or an
            object with Arrow's stream interface, such as a pyarrow table, a record batch reader, or
            a DataFrame of polars or pandas (2.2 or newer).
        scorer: scorer of the task.
        options: options of the job. Only parameters, columns, keep, errors, max_errors and
            part_rows are used.

    Returns:
        A `pyarrow.RecordBatchReader` for a table, or else an iterator over dictionaries, like rows
        of JSONL.

    Raises:
        InvalidInputError: an option is invalid, or the table lacks a column that is read.
        JobError: the job ends early. This is raised while the result is read.
    """
    options = options or ScoreOptions()
    if hasattr(data, "scanner"):
        return _score_table(data.scanner().to_reader(), scorer, options)
    if hasattr(data, "__arrow_c_stream__"):
        return _score_table(pa.RecordBatchReader.from_stream(data), scorer, options)
    if hasattr(data, "columns") or isinstance(data, str | Mapping):
        raise InvalidInputError(
            f"A {type(data).__name__} is neither an iterable of rows nor a table with Arrow's "
            "stream interface. Pass a list of dictionaries or a table (pandas: 2.2 or newer)."
        )
    reader = RowReader(scorer.task, options, in_table=False)
    check_head(scorer, reader.parameters)
    return _score_rows(data, scorer, reader, options)


def _score_rows(
    data: Iterable[Any], scorer: Scorer, reader: RowReader, options: ScoreOptions
) -> Iterator[dict[str, Any]]:
    layout = Layout(type=TableType(format="jsonl"), reader=reader, kept_types=None)
    rows = (Row("a row", dict(row) if isinstance(row, Mapping) else {"text": row}) for row in data)
    batches = collect_rows(rows, reader.selection)
    for part in answer_batches(scorer, reader, batches, options):
        yield from json_rows_of(layout, part)


def table_layout(task: str, schema: Any, options: ScoreOptions) -> Layout:
    """Return the layout of a table's rows with their answers.

    Args:
        schema: pyarrow schema of the table.
    """
    reader = RowReader(task, options, in_table=True)
    reader.check("The table", schema.names)
    keep = schema.names if options.keep is None else options.keep
    kept_types = {name: schema.field(name).type for name in keep}
    return Layout(type=TableType(format="parquet"), reader=reader, kept_types=kept_types)


def _score_table(table: Any, scorer: Scorer, options: ScoreOptions) -> Any:
    layout = table_layout(scorer.task, table.schema, options)
    check_head(scorer, layout.reader.parameters)

    def scored() -> Iterator[Any]:
        batches = _batches(table, layout.reader.selection)
        for part in answer_batches(scorer, layout.reader, batches, options):
            yield from to_table(layout, part).to_batches()

    return pa.RecordBatchReader.from_batches(layout.schema, scored())


def _batches(table: Any, selection: RowSelection) -> Iterator[RowBatch]:
    num_before = 0
    for batch in table:
        yield from arrow_batches(batch, selection, "row ", num_before)
        num_before += batch.num_rows
