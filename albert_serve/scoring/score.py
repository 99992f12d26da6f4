"""Batch scoring: a JSONL file of inputs to a JSONL file of answers, row for row in order.

A row is `{"inputs": ..., "parameters": {...}}` as the endpoint takes it, or the fields of one item:
`{"text"}`, `{"text", "text_pair"}`, `{"question", "context"}`, `{"sentences"}`; an `"id"` is copied
to the result, other columns are ignored. A result is `{"id", "output"}`, with `"warnings"`,
`"truncated_tokens"` and `"truncated_at"` if there are any, or `{"id", "error", "error_type"}`: a
bad row never stops the job. Files ending in `.gz` or `.xz` are compressed. A regular file as output
has a temporary name until it is complete; a pipe or a device is written to at once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from albert_serve.api.schemas import TaskRequest, describe
from albert_serve.errors import (
    AlbertServeError,
    BodyTooLargeError,
    InvalidInputError,
    MalformedRequestError,
)
from albert_serve.progress import progress_bar
from albert_serve.scoring.jsonl import MAX_LINE_BYTES, read_lines, write_lines
from albert_serve.tasks import (
    TASKS,
    AnyTask,
    EncoderInput,
    Logits,
    Prepared,
    Round,
    TaskSetup,
    open_task,
    prepare_request,
    read_cuts,
)
from albert_serve.tasks.base import Runner
from albert_serve.tasks.grouping import group_by_length

# Enough for the engine's parallel sessions, and few enough for the memory of fill-mask's
# vocabulary-wide logits.
_BATCHES_AT_ONCE: Final = 8
# The fields of a bare item.
_FIELDS: Final = {
    "fill-mask": ("text",),
    "text-classification": ("text", "text_pair"),
    "question-answering": ("question", "context"),
    "sentence-order": ("text", "text_pair", "sentences"),
    "multiple-choice": ("context", "question", "choices"),
    "feature-extraction": ("text",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSummary:
    """The result of a job.

    Attributes:
        first_error: the message of the first row with an error.
    """

    num_rows: int
    num_errors: int
    duration_s: float
    first_error: str | None = None

    def __str__(self) -> str:
        rate = self.num_rows / self.duration_s if self.duration_s else 0.0
        return (
            f"{self.num_rows} rows, {self.num_errors} with errors, in {self.duration_s:.1f} s "
            f"({rate:.1f} rows/s)"
        )


def score_file(
    engine: Runner,
    task: str,
    setup: TaskSetup,
    source: Path,
    output: Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    num_window_rows: int = 512,
) -> ScoreSummary:
    """Answer every row of `source` into `output`.

    Args:
        engine: runs the model.
        task: its name, such as "fill-mask".
        setup: the model's tokenizer and labels.
        source: JSONL, one row a line.
        output: JSONL; a regular file is replaced, a pipe or a device is written to.
        parameters: the task's, for all rows; a row's own take precedence.
        num_window_rows: rows that are read ahead, so that those of like lengths run together.

    Raises:
        NotFoundError: there is no such task.
        InvalidInputError: a parameter is wrong, or `source` is damaged, of another format, or is
            `output`.
        OSError: a file cannot be read or written.
    """
    if output.is_file() and output.samefile(source):
        raise InvalidInputError(f"{output} is also the input; name another output")
    opened = open_task(task, setup)
    reader = _RowReader(task=task, opened=opened, parameters=_checked(task, parameters or {}))
    started_s = time.monotonic()
    num_rows = num_errors = 0
    first_error: str | None = None
    with write_lines(output) as stream, progress_bar(title=task, unit="rows") as bar:
        rows = (reader.read(number, line) for number, line in read_lines(source))
        while window := list(islice(rows, num_window_rows)):
            _answer(engine, window)
            stream.writelines(row.to_json() + "\n" for row in window)
            errors = [str(row.error) for row in window if row.error is not None]
            first_error = first_error or next(iter(errors), None)
            num_rows += len(window)
            num_errors += len(errors)
            bar.update(len(window))
    duration_s = time.monotonic() - started_s
    return ScoreSummary(
        num_rows=num_rows,
        num_errors=num_errors,
        duration_s=duration_s,
        first_error=first_error,
    )


@dataclass(kw_only=True, slots=True)
class _Row:
    """One line, and its result."""

    passed: dict[str, Any]
    items: list[Prepared[Any]] = field(default_factory=list)
    is_list: bool = False
    answers: dict[int, Any] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    error: AlbertServeError | None = None

    def to_json(self) -> str:
        result: dict[str, Any] = dict(self.passed)
        if self.error is not None:
            result |= {"error": str(self.error), "error_type": self.error.error_type}
        else:
            answers = [self.answers[number] for number in range(len(self.items))]
            result["output"] = to_jsonable_python(answers if self.is_list else answers[0])
            result |= self._notes()
        return json.dumps(result, ensure_ascii=False, allow_nan=False)

    def _notes(self) -> dict[str, Any]:
        warnings = [warning for item in self.items for warning in item.warnings]
        num_truncated = sum(item.num_truncated for item in self.items)
        notes = {
            "warnings": warnings,
            "truncated_tokens": num_truncated,
            "truncated_at": self.cuts,
        }
        return {name: value for name, value in notes.items() if value}


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowReader:
    """Parses lines to rows; an invalid line becomes a row with an error."""

    task: str
    opened: AnyTask
    parameters: dict[str, Any]

    def read(self, number: int, line: bytes | None) -> _Row:
        row = _Row(passed={})
        try:
            fields = _parse(number, line)
            row.passed = {"id": fields["id"]} if "id" in fields else {}
            request = self._request(fields)
            row.is_list = isinstance(request.inputs, list)
            row.items = prepare_request(self.opened, request)
            row.cuts = read_cuts(request, row.items)
        except AlbertServeError as error:
            row.error = error
        return row

    def _request(self, fields: dict[str, Any]) -> TaskRequest:
        parameters = fields.get("parameters") or {}
        if isinstance(parameters, dict):
            parameters = {**self.parameters, **parameters}
        try:
            return TASKS[self.task].request.model_validate(
                {"inputs": self._inputs(fields), "parameters": parameters}
            )
        except ValidationError as error:
            raise InvalidInputError(describe(error)) from error

    def _inputs(self, fields: dict[str, Any]) -> Any:
        if "inputs" in fields:
            return fields["inputs"]
        item = {name: fields[name] for name in _FIELDS[self.task] if name in fields}
        if not item:
            *names, last = _FIELDS[self.task]
            expected = f"{', '.join(names)} or {last}" if names else last
            raise InvalidInputError(f"the row has neither inputs nor {expected}")
        return item["text"] if _FIELDS[self.task] == ("text",) else item


def _checked(task: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        checked = TASKS[task].parameters.model_validate(dict(parameters))
    except ValidationError as error:
        raise InvalidInputError(f"parameters: {describe(error)}") from error
    return checked.model_dump(exclude_unset=True)


def _parse(number: int, line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise BodyTooLargeError(
            f"line {number} has more than {MAX_LINE_BYTES} bytes; make several rows of it"
        )
    try:
        fields = json.loads(line, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise MalformedRequestError(f"line {number} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedRequestError(f"line {number} is not a JSON object")
    return fields


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is out of the range of numbers")
    return number


def _answer(engine: Runner, rows: Sequence[_Row]) -> None:
    """Run the rows' rounds until each item has an answer or an error."""
    items = [
        _Item(row=row, number=number, stage=item)
        for row in rows
        for number, item in enumerate(row.items)
    ]
    while items:
        items = [item for item in _run_round(engine, items) if item.row.error is None]


@dataclass(kw_only=True, slots=True, eq=False)
class _Item:
    """An item of a row, and its current round."""

    row: _Row
    number: int
    stage: Round[Any]
    arrived: dict[int, Logits] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """An input, and its index in an item's round."""

    item: _Item
    part: int
    encoder_input: EncoderInput


def _run_round(engine: Runner, items: Sequence[_Item]) -> list[_Item]:
    """Run one round of the items, like lengths together; return the items with another round."""
    places = [
        _Place(item=item, part=part, encoder_input=encoder_input)
        for item in items
        for part, encoder_input in enumerate(item.stage.inputs)
    ]
    further = []
    lengths = [len(place.encoder_input.ids) for place in places]
    for indices in group_by_length(lengths, _BATCHES_AT_ONCE * engine.max_batch_tokens):
        group = [places[index] for index in indices]
        for place, outcome in zip(
            group, _run(engine, [place.encoder_input for place in group]), strict=True
        ):
            item = place.item
            if isinstance(outcome, AlbertServeError):
                item.row.error = item.row.error or outcome
                continue
            item.arrived[place.part] = outcome
            # Finished at once to free the logits, which fill-mask has as wide as the vocabulary.
            if len(item.arrived) == len(item.stage.inputs) and (after := _finish(item)):
                further.append(after)
    return further


def _finish(item: _Item) -> _Item | None:
    """Store the row's answer, or return the item in its next round."""
    logits = [item.arrived[part] for part in range(len(item.arrived))]
    item.arrived.clear()
    try:
        outcome = item.stage.finish(logits)
    except AlbertServeError as error:
        item.row.error = item.row.error or error
        return None
    if isinstance(outcome, Round):
        return _Item(row=item.row, number=item.number, stage=outcome)
    item.row.answers[item.number] = outcome
    return None


def _run(engine: Runner, inputs: Sequence[EncoderInput]) -> list[Logits | AlbertServeError]:
    """Return the logits or the error of each input; bisects until failing inputs are alone."""
    try:
        return list(engine.run(inputs))
    except AlbertServeError as error:
        if len(inputs) == 1:
            return [error]
    half = len(inputs) // 2
    return _run(engine, inputs[:half]) + _run(engine, inputs[half:])
