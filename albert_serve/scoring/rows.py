"""Make requests from rows, which are requests or have the fields of the task."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from pydantic_core import to_jsonable_python

from albert_serve.api.schemas import TaskRequest
from albert_serve.api.wire import validate
from albert_serve.errors import InvalidInputError, NotFoundError
from albert_serve.scoring.answers import JSON_NAMES, SCORED_TASKS, answer_columns
from albert_serve.scoring.inputs import RowBatch, RowSelection
from albert_serve.scoring.options import ScoreOptions
from albert_serve.tables.columnar import plain_rows
from albert_serve.tables.columns import find_column, find_name, find_texts
from albert_serve.tasks import TASKS

# Maximum size of a part's text in memory.
_MAX_PART_BYTES: Final = 4 << 20
# Memory of an answer relative to its text, if the answer is a vector for each token.
_TOKEN_EMBEDDINGS_WEIGHT: Final = 64


# The two names of the truncation parameter. Hugging Face uses the second.
_TRUNCATION: Final = frozenset({"truncation", "truncate"})


class RowReader:
    """A reader that makes requests from rows.

    Args:
        task: name of the task.
        options: options of the job.
        in_table: whether the output is a table, which has one item per row.

    Attributes:
        parameters: parameters of the job, with defaults.
        answers: Arrow types of a table's answer columns, by name.
        selection: columns to read, and limits of a batch.
    """

    def __init__(self, task: str, options: ScoreOptions, *, in_table: bool) -> None:
        if task not in SCORED_TASKS:
            raise NotFoundError(f"Unknown task {task!r}. Choose one of {', '.join(SCORED_TASKS)}.")
        self.task = task
        self._scored = SCORED_TASKS[task]
        self.parameters = _validated(task, {**self._scored.defaults, **options.parameters})
        self.answers = answer_columns(task, options.parameters)
        fields = self._scored.fields
        unknown = [field for field in options.columns if field not in (*fields, "inputs")]
        if unknown:
            raise InvalidInputError(
                f"{task} has no field {unknown[0]!r}. Choose one of {', '.join(fields)}."
            )
        self._truncation = options.truncation
        self._column_names = tuple(options.columns.items())
        self._keep = options.keep
        self._in_table = in_table
        self._reserved = set(self.answers) if in_table else JSON_NAMES
        has_vectors = self.parameters.get("pooling") == "none"
        self.selection = RowSelection(
            fields=lambda names: {*self._columns(names).values(), "parameters"},
            keep=options.keep,
            max_rows=options.part_rows,
            max_bytes=_MAX_PART_BYTES // (_TOKEN_EMBEDDINGS_WEIGHT if has_vectors else 1),
        )

    def _columns(self, names: Collection[str]) -> dict[str, str]:
        return _columns_of(self.task, self._column_names, tuple(names))

    def check(self, table: str, columns: Collection[str]) -> None:
        """Check that a table has the columns that are read and kept.

        Args:
            table: name of the table in messages.
            columns: names of its columns.
        """
        listed = ", ".join(columns)
        missing = [name for _, name in self._column_names if find_name(columns, name) is None]
        missing += [name for name in self._keep or () if name not in columns]
        if missing:
            raise InvalidInputError(f"{table} has no column {missing[0]!r}. Choose from {listed}.")
        try:
            fields = self._columns(columns)
        except InvalidInputError as error:
            raise InvalidInputError(f"{table}: {error}") from error
        if "inputs" not in fields and not any(
            fields.keys() >= set(required) for required in self._scored.required
        ):
            names = dict(self._column_names)
            expected = " or ".join(
                " and ".join(repr(names.get(field, field)) for field in alternative)
                for alternative in self._scored.required
            )
            raise InvalidInputError(
                f"{table} has no column {expected}; it has {listed}. Name the columns, for "
                f"example with --column {self._scored.fields[0]}=COLUMN."
            )

    def output_names(self, columns: Sequence[str]) -> dict[str, str]:
        """Return the output name of each input column.

        A column with the name of an answer column gets the prefix `input_`.
        """
        names = {}
        for column in columns:
            name = column
            while name in self._reserved or (name != column and name in columns):
                name = f"input_{name}"
            names[column] = name
        return names

    def request(self, batch: RowBatch, index: int) -> TaskRequest:
        """Return the request of a row."""
        if index in batch.errors:
            raise batch.errors[index]
        values = batch.values[index]
        request = self._request(values, is_text=batch.is_text)
        if self._in_table and isinstance(request.inputs, list):
            raise InvalidInputError(
                "The row has a list of inputs, but a table has one answer per row. "
                "Split it into several rows, or write JSONL."
            )
        return request

    def kept_rows(self, batch: RowBatch) -> list[dict[str, Any]]:
        """Return, for each row, the JSON values that the output keeps."""
        if batch.kept_columns is None:
            return [self._select_kept(values) for values in batch.values]
        rows: list[dict[str, Any]] = to_jsonable_python(
            plain_rows(batch.kept_columns), inf_nan_mode="null", bytes_mode="base64", fallback=str
        )
        return rows

    def _select_kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        names = values if self._keep is None else self._keep
        return {name: values[name] for name in names if name in values}

    def _request(self, values: Mapping[str, Any], *, is_text: bool) -> TaskRequest:
        # A CSV column named `parameters` is ordinary text, not JSON.
        parameters = None if is_text else values.get("parameters")
        parameters = {} if parameters is None else parameters
        if isinstance(parameters, dict):
            parameters = {**self.parameters, **parameters}
            if not _TRUNCATION & parameters.keys():
                parameters["truncation"] = self._truncation
        inputs = self._inputs(values, is_text=is_text)
        body = {"inputs": inputs, "parameters": parameters}
        return validate(TASKS[self.task].request, body)

    def _inputs(self, values: Mapping[str, Any], *, is_text: bool) -> Any:
        columns = self._columns(values)
        if "inputs" in columns and values[columns["inputs"]] is not None:
            return values[columns["inputs"]]
        fields = self._scored.fields
        item = {
            field: values[columns[field]]
            for field in fields
            if field in columns and values[columns[field]] is not None
        }
        if is_text:
            item = self._from_text(item)
        if not item:
            *names, last = [dict(self._column_names).get(field, field) for field in fields]
            expected = f"{', '.join(names)} or {last}" if names else last
            raise InvalidInputError(f"The row has neither inputs nor {expected}.")
        return item["text"] if fields == ("text",) else item

    def _from_text(self, item: dict[str, str]) -> dict[str, Any]:
        """Return an item's values, without empty optional cells and with parsed lists."""
        (first, *alternatives) = self._scored.required
        required = () if alternatives else first
        values: dict[str, Any] = {}
        for field, cell in item.items():
            if cell or field in required:
                values[field] = _parse_list(field, cell) if field == "sentences" else cell
        return values


@lru_cache(maxsize=256)
def _columns_of(
    task: str, column_names: tuple[tuple[str, str], ...], names: tuple[str, ...]
) -> dict[str, str]:
    """Return the column of each field that a row has, including `inputs`.

    Args:
        column_names: pairs of a field and the column name that replaces its default name.
        names: names of all columns.
    """
    scored, requested = SCORED_TASKS[task], dict(column_names)
    text, *others = scored.fields
    columns: dict[str, str | None] = {"inputs": requested.get("inputs", "inputs")}
    if columns["inputs"] not in names:
        del columns["inputs"]
    if scored.texts:
        pair = others[0] if others else ""
        text_columns = find_texts(names, scored.texts, requested.get(text), requested.get(pair))
        columns[text], columns[pair] = text_columns or (None, None)
        others = others[1:]
    for field in others if scored.texts else scored.fields:
        columns[field] = find_column(names, (field,), requested.get(field))
    return {field: name for field, name in columns.items() if field and name is not None}


def _parse_list(field: str, cell: str) -> Any:
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f'{field} is not a JSON list such as ["a", "b"]: {error}.'
        ) from error


def _validated(task: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        validated = validate(TASKS[task].parameters, dict(parameters))
    except InvalidInputError as error:
        raise InvalidInputError(f"parameters: {error}") from error
    return validated.model_dump(exclude_unset=True)
