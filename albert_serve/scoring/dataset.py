"""Scoring of tables and iterators in memory, lazily.

scorer = LocalScorer.open("models/albert-small-en", "text-classification")
for row in score_dataset(({"text": line} for line in lines), scorer):
    print(row["output"])
parquet.write_table(score_dataset(dataset, scorer).read_all(), "scored.parquet")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from albert_serve.errors import InvalidInputError
from albert_serve.scoring.distributed.ahead import answering_for
from albert_serve.scoring.formats import FileType, optional_module
from albert_serve.scoring.local import Scorer, check_head
from albert_serve.scoring.memo import Memo
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.output.layout import Layout
from albert_serve.scoring.output.tables import to_table
from albert_serve.scoring.rows import RowReader
from albert_serve.scoring.sources import Record, records_of


def score_dataset(data: Any, scorer: Scorer[Any], options: ScoreOptions | None = None) -> Any:
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
        pa = optional_module("pyarrow", "a table")
        return _score_table(pa.RecordBatchReader.from_stream(data), scorer, options)
    if hasattr(data, "columns") or isinstance(data, str | Mapping):
        raise InvalidInputError(
            f"a {type(data).__name__} is neither rows nor a table with Arrow's stream interface "
            "(pandas has it from 2.2 on)"
        )
    rows = _row_reader(scorer.task, options, in_table=False)
    check_head(scorer, rows.parameters)
    layout = Layout(type=FileType(format="jsonl"), reader=rows, kept=None)
    return _score_rows(data, scorer, options, layout)


def _row_reader(task: str, options: ScoreOptions, *, in_table: bool) -> RowReader:
    return RowReader(task, options.parameters, options.columns, options.keep, in_table=in_table)


def _score_rows(
    data: Iterable[Any], scorer: Scorer[Any], options: ScoreOptions, layout: Layout
) -> Iterator[dict[str, Any]]:
    records = (_record(number, row) for number, row in enumerate(data, start=1))
    answering = answering_for(scorer, layout.reader, options)
    with Memo(None) as memo:
        for part in answering.parts(records, memo):
            for row, result in zip(part.rows, part.answered, strict=True):
                yield layout.json_values(row, result)


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
    rows = _row_reader(task, options, in_table=True)
    rows.check("the table", schema.names)
    keep = schema.names if options.keep is None else options.keep
    kept = {name: schema.field(name).type for name in keep}
    return Layout(type=FileType(format="parquet"), reader=rows, kept=kept)


def _score_table(reader: Any, scorer: Scorer[Any], options: ScoreOptions) -> Any:
    pa = optional_module("pyarrow", "a table")
    layout = table_layout(scorer.task, reader.schema, options)
    check_head(scorer, layout.reader.parameters)
    answering = answering_for(scorer, layout.reader, options)
    schema = layout.schema()

    def batches() -> Iterator[Any]:
        records = _records(reader, layout.reader, list(layout.kept or ()))
        with Memo(None) as memo:
            for part in answering.parts(records, memo):
                yield from to_table(layout, schema, part.rows, part.answered).to_batches()

    return pa.RecordBatchReader.from_batches(schema, batches())


def _records(reader: Any, rows: RowReader, keep: list[str]) -> Iterator[Record]:
    fields = [name for name in reader.schema.names if name in rows.fields]
    number = 0
    for batch in reader:
        yield from records_of(batch, fields, keep, "row ", number)
        number += batch.num_rows
