"""Scoring of tables and iterators in memory, lazily.

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
    """Return the rows with their answers; they are computed as they are read.

    Args:
        data: an iterable of texts or of rows, which are dictionaries; or a table: a pyarrow
            dataset, or anything with Arrow's stream interface, such as a pyarrow table, a record
            batch reader, a frame of polars, or one of pandas from 2.2 on.
        scorer: answers the requests of a task.
        options: parameters, columns, keep, errors, max_errors, part_rows.

    Returns:
        An iterator of dictionaries, as rows of JSONL; of a table, a `pyarrow.RecordBatchReader`.

    Raises:
        InvalidInputError: an option is wrong, or the table has not the columns that are read.
        JobError: while it is read, the job cannot go on.
    """
    options = options or ScoreOptions()
    if hasattr(data, "scanner"):
        return _score_table(data.scanner().to_reader(), scorer, options)
    if hasattr(data, "__arrow_c_stream__"):
        return _score_table(pa.RecordBatchReader.from_stream(data), scorer, options)
    if hasattr(data, "columns") or isinstance(data, str | Mapping):
        raise InvalidInputError(
            f"a {type(data).__name__} is neither rows nor a table with Arrow's stream interface "
            "(pandas has it from 2.2 on)"
        )
    reader = RowReader(scorer.task, options, in_table=False)
    check_head(scorer, reader.parameters)
    return _score_rows(data, scorer, reader, options)


def _score_rows(
    data: Iterable[Any], scorer: Scorer, reader: RowReader, options: ScoreOptions
) -> Iterator[dict[str, Any]]:
    layout = Layout(type=TableType(format="jsonl"), reader=reader, kept=None)
    rows = (
        Row(f"row {number}", dict(row) if isinstance(row, Mapping) else {"text": row})
        for number, row in enumerate(data, start=1)
    )
    batches = collect_rows(rows, reader.selection)
    for part in answer_batches(scorer, reader, batches, options):
        yield from json_rows_of(layout, part)


def table_layout(task: str, schema: Any, options: ScoreOptions) -> Layout:
    """Return the layout of a table's rows with their answers.

    Args:
        schema: the table's, of pyarrow.
    """
    reader = RowReader(task, options, in_table=True)
    reader.check("the table", schema.names)
    keep = schema.names if options.keep is None else options.keep
    kept = {name: schema.field(name).type for name in keep}
    return Layout(type=TableType(format="parquet"), reader=reader, kept=kept)


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
