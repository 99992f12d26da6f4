"""Rows as requests: a row is `{"inputs", "parameters"}` as the endpoint has it, or bare fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from albert_serve.api.schemas import TaskRequest, describe
from albert_serve.errors import InvalidInputError, NotFoundError, RequestError
from albert_serve.scoring.answers import SCORED_TASKS, ScoredTask, reserved_names
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.records import Record
from albert_serve.tables import is_utf8
from albert_serve.tasks import TASKS

_REQUEST_FIELDS: Final = ("inputs", "parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A record, and the request that it makes.

    Attributes:
        request: or the error of a row that cannot be read.
        key: equal for rows that have the same answer; empty where there is no request.
    """

    record: Record
    request: TaskRequest | RequestError
    key: bytes = b""


class RowReader:
    """Makes requests of records; a bad record becomes a row with an error.

    Args:
        task: the name of the task.
        options: the parameters, and the columns that are read and kept.
        in_table: whether the output has the columns of a table, which hold one item a row.

    Raises:
        NotFoundError: there is no such task.
        InvalidInputError: a parameter is wrong, or the task has no such field.
    """

    def __init__(self, task: str, options: ScoreOptions, *, in_table: bool) -> None:
        if task not in SCORED_TASKS:
            raise NotFoundError(f"no task {task!r}; there are {', '.join(SCORED_TASKS)}")
        self.task = task
        self.parameters = _checked(task, options.parameters)
        self._scored: ScoredTask = SCORED_TASKS[task]
        columns = options.columns
        unknown = [field for field in columns if field not in (*self._scored.fields, "inputs")]
        if unknown:
            raise InvalidInputError(
                f"{task} has no field {unknown[0]!r}; it has {', '.join(self._scored.fields)}"
            )
        self._columns = {field: columns.get(field, field) for field in self._scored.fields}
        self._columns |= {name: columns.get(name, name) for name in _REQUEST_FIELDS}
        self._named = list(columns.values())
        self._keep = options.keep
        self._in_table = in_table
        self._reserved = reserved_names(task, in_table=in_table)

    @property
    def fields(self) -> list[str]:
        """The columns that are read, where the input has them."""
        return list(self._columns.values())

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
        kept = columns if self._keep is None else self._keep
        taken = [name for name in kept if name in self._reserved]
        if taken:
            raise InvalidInputError(f"{table}: {_collision(taken[0])}")

    def read(self, record: Record) -> Row:
        """Return the row of a record."""
        try:
            if record.error is not None:
                raise record.error
            request = self._request(record)
            if self._in_table and isinstance(request.inputs, list):
                raise InvalidInputError(
                    "the row has a list of inputs, and a table has one answer a row; "
                    "make several rows of it, or write .jsonl"
                )
            self._check_names(record)
        except RequestError as error:
            return Row(record=record, request=error)
        return Row(record=record, request=request, key=_key(request))

    def kept(self, record: Record) -> dict[str, Any]:
        """Return the values of a JSON or CSV record that the output keeps."""
        names = record.values if self._keep is None else self._keep
        return {
            name: record.values[name]
            for name in names
            if name in record.values and name not in self._reserved
        }

    def _check_names(self, record: Record) -> None:
        kept = record.values if self._keep is None else self._keep
        taken = [name for name in kept if name in self._reserved and name in record.values]
        if taken and record.batch is None:
            raise InvalidInputError(_collision(taken[0]))

    def _request(self, record: Record) -> TaskRequest:
        # A CSV file may well have a column of that name, which holds no JSON.
        parameters = None if record.is_text else record.values.get(self._columns["parameters"])
        parameters = {} if parameters is None else parameters
        if record.batch is not None and isinstance(parameters, dict):
            # A structure has all its fields in each row.
            parameters = {name: value for name, value in parameters.items() if value is not None}
        if isinstance(parameters, dict):
            parameters = {**self.parameters, **parameters}
        try:
            return TASKS[self.task].request.model_validate(
                {"inputs": self._inputs(record), "parameters": parameters}
            )
        except ValidationError as error:
            raise InvalidInputError(describe(error)) from error

    def _inputs(self, record: Record) -> Any:
        values = record.values
        if (name := self._columns["inputs"]) in values:
            return values[name]
        item = {
            field: values[self._columns[field]]
            for field in self._scored.fields
            if self._columns[field] in values
        }
        if record.batch is not None:
            item = {field: value for field, value in item.items() if value is not None}
        if record.is_text or record.batch is not None:
            self._check_encoding(item)
        if record.is_text:
            item = self._from_text(item)
        if not item:
            *names, last = [self._columns[field] for field in self._scored.fields]
            expected = f"{', '.join(names)} or {last}" if names else last
            raise InvalidInputError(f"the row has neither inputs nor {expected}")
        return item["text"] if self._scored.fields == ("text",) else item

    def _check_encoding(self, item: Mapping[str, Any]) -> None:
        """Check that no bytes were read that are not UTF-8, which became lone surrogates."""
        for field, value in item.items():
            if isinstance(value, str) and not is_utf8(value):
                raise InvalidInputError(f"the column {self._columns[field]!r} is not UTF-8")

    def _from_text(self, item: dict[str, str]) -> dict[str, Any]:
        """Return the cells of an item: optional ones that are empty left out, lists from JSON."""
        (first, *others) = self._scored.required
        needed = () if others else first
        values: dict[str, Any] = {
            field: cell for field, cell in item.items() if cell or field in needed
        }
        for field in self._scored.lists:
            if field in values:
                values[field] = _list_of(field, values[field])
        return values


def _list_of(field: str, cell: str) -> Any:
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f'{field} is not a JSON list such as ["a", "b"]: {error}'
        ) from error


def _collision(name: str) -> str:
    return (
        f"the column {name!r} has a name that the output has for the answer; "
        "name the columns to keep without it (--keep)"
    )


def _checked(task: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        checked = TASKS[task].parameters.model_validate(dict(parameters))
    except ValidationError as error:
        raise InvalidInputError(f"parameters: {describe(error)}") from error
    return checked.model_dump(exclude_unset=True)


def _key(request: TaskRequest) -> bytes:
    content = request.model_dump(exclude_unset=True)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
