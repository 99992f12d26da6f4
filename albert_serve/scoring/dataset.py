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
from albert_serve.scoring.answering import Scorer, answer_records, check_head
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.output.layout import Layout
from albert_serve.scoring.output.writers import to_table
from albert_serve.scoring.records import Record, records_of
from albert_serve.scoring.rows import RowReader
from albert_serve.tables import TableType


def score_dataset(data: Any, scorer: Scorer, options: ScoreOptions | None = None) -> Any:
    """Return the rows with their answers; they are computed as they are read.

    Args:
        data: an iterable of texts or of rows, which are dictionaries; or a table: a pyarrow
            dataset, or anything with Arrow's stream interface, such as a pyarrow table, a record
            batch reader, a frame of polars, or one of pandas from 2.2 on.
        scorer: answers the requests of a task.
        options: parameters, columns, keep, errors, max_errors, part_rows, dedupe.

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
    rows = RowReader(scorer.task, options, in_table=False)
    check_head(scorer, rows.parameters)
    layout = Layout(type=TableType(format="jsonl"), reader=rows, kept=None)
    return _score_rows(data, scorer, options, layout)


def _score_rows(
    data: Iterable[Any], scorer: Scorer, options: ScoreOptions, layout: Layout
) -> Iterator[dict[str, Any]]:
    records = (_record(number, row) for number, row in enumerate(data, start=1))
    for part in answer_records(scorer, layout.reader, records, options):
        for row, result in zip(part.rows, part.results, strict=True):
            yield {**layout.kept_values(row), **result.values}


def _record(number: int, row: object) -> Record:
    values = row if isinstance(row, Mapping) else {"text": row}
    num_bytes = sum(len(value) for value in values.values() if isinstance(value, str))
    return Record(place=f"row {number}", values=dict(values), num_bytes=num_bytes)


def table_layout(task: str, schema: Any, options: ScoreOptions) -> Layout:
    """Return the layout of a table's rows with their answers.

    Args:
        schema: the table's, of pyarrow.

    Raises:
        InvalidInputError: an option is wrong, or the table has not the columns that are read.
    """
    rows = RowReader(task, options, in_table=True)
    rows.check("the table", schema.names)
    keep = schema.names if options.keep is None else options.keep
    kept = {name: schema.field(name).type for name in keep}
    return Layout(type=TableType(format="parquet"), reader=rows, kept=kept)


def _score_table(reader: Any, scorer: Scorer, options: ScoreOptions) -> Any:
    layout = table_layout(scorer.task, reader.schema, options)
    check_head(scorer, layout.reader.parameters)
    schema = layout.schema()

    def batches() -> Iterator[Any]:
        records = _records(reader, layout.reader, list(layout.kept or ()))
        for part in answer_records(scorer, layout.reader, records, options):
            yield from to_table(layout, schema, part.rows, part.results).to_batches()

    return pa.RecordBatchReader.from_batches(schema, batches())


def _records(reader: Any, rows: RowReader, keep: list[str]) -> Iterator[Record]:
    fields = [name for name in reader.schema.names if name in rows.fields]
    number = 0
    for batch in reader:
        yield from records_of(batch, fields, keep, "row ", number)
        number += batch.num_rows
