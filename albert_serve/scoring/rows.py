"""Rows as requests: a row is `{"inputs", "parameters"}` as the endpoint has it, or bare fields."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from albert_serve.api.schemas import TaskRequest, describe
from albert_serve.errors import InvalidInputError, NotFoundError
from albert_serve.scoring.answers import SCORED_TASKS, reserved_names
from albert_serve.scoring.inputs import RowBatch, RowSelection, plain_rows
from albert_serve.scoring.options import ScoreOptions
from albert_serve.tables import is_utf8
from albert_serve.tasks import TASKS

_REQUEST_FIELDS: Final = ("inputs", "parameters")
# The limit of a part's text in memory.
_MAX_PART_BYTES: Final = 4 << 20
# How much more memory than a text its answer has, where that is a vector for each token.
_TOKEN_EMBEDDINGS_WEIGHT: Final = 64


class RowReader:
    """Makes requests of rows.

    Args:
        task: the name of the task.
        options: the parameters, and the columns that are read and kept.
        in_table: whether the output has the columns of a table, which hold one item a row.

    Attributes:
        selection: what is read of an input.

    Raises:
        NotFoundError: there is no such task.
        InvalidInputError: a parameter is wrong, or the task has no such field.
    """

    def __init__(self, task: str, options: ScoreOptions, *, in_table: bool) -> None:
        if task not in SCORED_TASKS:
            raise NotFoundError(f"no task {task!r}; there are {', '.join(SCORED_TASKS)}")
        self.task = task
        self.parameters = _checked(task, options.parameters)
        self._scored = SCORED_TASKS[task]
        fields = self._scored.fields
        unknown = [field for field in options.columns if field not in (*fields, "inputs")]
        if unknown:
            raise InvalidInputError(
                f"{task} has no field {unknown[0]!r}; it has {', '.join(fields)}"
            )
        self._columns = {
            field: options.columns.get(field, field) for field in (*fields, *_REQUEST_FIELDS)
        }
        self._named = list(options.columns.values())
        self._keep = options.keep
        self._in_table = in_table
        self._reserved = reserved_names(task, in_table=in_table)
        has_vectors = self.parameters.get("pooling") == "none"
        self.selection = RowSelection(
            fields=list(self._columns.values()),
            keep=options.keep,
            max_rows=options.part_rows,
            max_bytes=_MAX_PART_BYTES // (_TOKEN_EMBEDDINGS_WEIGHT if has_vectors else 1),
        )

    def check(self, table: str, columns: Collection[str]) -> None:
        """Check that a table has the columns that are read and kept.

        Args:
            table: its name.

        Raises:
            InvalidInputError: it has not, or one that is kept has the name of the answer's.
        """
        names = set(columns)
        listed = ", ".join(columns)
        missing = [name for name in (*self._named, *(self._keep or ())) if name not in names]
        if missing:
            raise InvalidInputError(f"{table} has no column {missing[0]!r}; it has {listed}")
        required = [
            [self._columns[field] for field in alternative] for alternative in self._scored.required
        ]
        if "inputs" not in names and not any(names.issuperset(some) for some in required):
            expected = " or ".join(" and ".join(map(repr, some)) for some in required)
            field = self._scored.fields[0]
            raise InvalidInputError(
                f"{table} has no column {expected}; it has {listed}. Name the columns, as "
                f"in --column {field}=COLUMN"
            )
        try:
            self._check_names(columns)
        except InvalidInputError as error:
            raise InvalidInputError(f"{table}: {error}") from error

    def request(self, batch: RowBatch, index: int) -> TaskRequest:
        """Return the request of a row.

        Raises:
            RequestError: the row cannot be read, or makes none.
        """
        if index in batch.errors:
            raise batch.errors[index]
        values = batch.values[index]
        request = self._request(values, is_text=batch.is_text)
        if self._in_table and isinstance(request.inputs, list):
            raise InvalidInputError(
                "the row has a list of inputs, and a table has one answer a row; "
                "make several rows of it, or write .jsonl"
            )
        if batch.kept is None:
            self._check_names(values)
        return request

    def kept_rows(self, batch: RowBatch) -> list[dict[str, Any]]:
        """Return the values that the output keeps of each row, as JSON."""
        if batch.kept is None:
            return [self._kept(values) for values in batch.values]
        rows: list[dict[str, Any]] = to_jsonable_python(
            plain_rows(batch.kept), inf_nan_mode="null", bytes_mode="base64", fallback=str
        )
        return rows

    def _kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        names = values if self._keep is None else self._keep
        return {
            name: values[name] for name in names if name in values and name not in self._reserved
        }

    def _check_names(self, columns: Collection[str]) -> None:
        kept = columns if self._keep is None else self._keep
        for name in kept:
            if name in self._reserved and name in columns:
                raise InvalidInputError(
                    f"the column {name!r} has a name that the output has for the answer; "
                    "name the columns to keep without it (--keep)"
                )

    def _request(self, values: Mapping[str, Any], *, is_text: bool) -> TaskRequest:
        # A CSV file may well have a column of that name, which holds no JSON.
        parameters = None if is_text else values.get(self._columns["parameters"])
        parameters = {} if parameters is None else parameters
        if isinstance(parameters, dict):
            parameters = {**self.parameters, **parameters}
        inputs = self._inputs(values, is_text=is_text)
        try:
            return TASKS[self.task].request.model_validate(
                {"inputs": inputs, "parameters": parameters}
            )
        except ValidationError as error:
            raise InvalidInputError(describe(error)) from error

    def _inputs(self, values: Mapping[str, Any], *, is_text: bool) -> Any:
        if (column := self._columns["inputs"]) in values:
            return values[column]
        fields = self._scored.fields
        item = {
            field: values[self._columns[field]]
            for field in fields
            if self._columns[field] in values
        }
        if is_text:
            item = self._from_text(item)
        if not item:
            *names, last = [self._columns[field] for field in fields]
            expected = f"{', '.join(names)} or {last}" if names else last
            raise InvalidInputError(f"the row has neither inputs nor {expected}")
        return item["text"] if fields == ("text",) else item

    def _from_text(self, item: dict[str, str]) -> dict[str, Any]:
        """Return the cells of an item: optional ones that are empty left out, lists from JSON."""
        (first, *others) = self._scored.required
        needed = () if others else first
        values: dict[str, Any] = {}
        for field, cell in item.items():
            if not is_utf8(cell):
                raise InvalidInputError(f"the column {self._columns[field]!r} is not UTF-8")
            if cell or field in needed:
                values[field] = _list_of(field, cell) if field in self._scored.lists else cell
        return values


def _list_of(field: str, cell: str) -> Any:
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f'{field} is not a JSON list such as ["a", "b"]: {error}'
        ) from error


def _checked(task: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        checked = TASKS[task].parameters.model_validate(dict(parameters))
    except ValidationError as error:
        raise InvalidInputError(f"parameters: {describe(error)}") from error
    return checked.model_dump(exclude_unset=True)
