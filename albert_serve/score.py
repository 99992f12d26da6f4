"""Batch scoring: a JSONL file of inputs to a JSONL file of answers, row for row in order.

A row is `{"inputs": ..., "parameters": {...}}` as the endpoint takes it, or the fields of one item:
`{"text"}`, `{"text", "text_pair"}`, `{"question", "context"}`; an `"id"` is passed through, other
columns are passed over. A result is `{"id", "output"}`, with `"warnings"` and `"truncated_tokens"`
where there are any, or `{"id", "error", "error_type"}`: a bad row never stops the job. Files ending
in `.gz` or `.xz` are compressed. The output appears under its name when it is complete.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TextIO

from pydantic import ValidationError
from pydantic_core import to_jsonable_python
from tqdm import tqdm

from albert_serve.errors import AlbertServeError, InvalidInputError, MalformedRequestError
from albert_serve.schemas import TaskRequest, describe
from albert_serve.tasks import (
    TASKS,
    AnyTask,
    EncoderInput,
    Logits,
    Prepared,
    TaskSetup,
    open_task,
    prepare_request,
)

# The fields of a bare item.
_FIELDS: Final = {
    "fill-mask": ("text",),
    "text-classification": ("text", "text_pair"),
    "question-answering": ("question", "context"),
    "sentence-order": ("text", "text_pair"),
}


class Runner(Protocol):
    """What scoring needs of an engine."""

    @property
    def max_batch_tokens(self) -> int:
        """The most tokens, padding included, that run together."""
        ...

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Logits (R, K) of each input's rows, in order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSummary:
    """How a job went."""

    num_rows: int
    num_errors: int
    duration_s: float

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
        output: JSONL; replaced if it exists.
        parameters: the task's, for all rows; a row's own come before them.
        num_window_rows: rows that are read ahead, so that those of like lengths run together.

    Raises:
        NotFoundError: there is no such task.
        InvalidInputError: a parameter is wrong, or `source` is damaged, or is `output`.
        OSError: a file cannot be read or written.
    """
    if output.exists() and output.samefile(source):
        raise InvalidInputError(f"{output} is also the input; name another output")
    opened = open_task(task, setup)
    reader = _RowReader(task=task, opened=opened, parameters=_checked(task, parameters or {}))
    started_s = time.monotonic()
    num_rows = num_errors = 0
    with _appearing(output) as stream, tqdm(unit=" rows", desc=task, disable=None) as bar:
        rows = (reader.read(number, line) for number, line in _lines(source))
        while window := list(islice(rows, num_window_rows)):
            _answer(engine, window)
            stream.writelines(row.to_json() + "\n" for row in window)
            num_rows += len(window)
            num_errors += sum(row.error is not None for row in window)
            bar.update(len(window))
    duration_s = time.monotonic() - started_s
    return ScoreSummary(num_rows=num_rows, num_errors=num_errors, duration_s=duration_s)


@dataclass(kw_only=True, slots=True)
class _Row:
    """One line on its way to a result."""

    passed: dict[str, Any]
    items: list[Prepared[Any]] = field(default_factory=list)
    is_list: bool = False
    answers: dict[int, Any] = field(default_factory=dict)
    error: AlbertServeError | None = None

    def to_json(self) -> str:
        result: dict[str, Any] = dict(self.passed)
        if self.error is not None:
            result |= {"error": str(self.error), "error_type": self.error.error_type}
        else:
            answers = [self.answers[number] for number in range(len(self.items))]
            result["output"] = to_jsonable_python(answers if self.is_list else answers[0])
            result |= self._remarks()
        return json.dumps(result, ensure_ascii=False)

    def _remarks(self) -> dict[str, Any]:
        warnings = [warning for item in self.items for warning in item.warnings]
        num_truncated = sum(item.num_truncated for item in self.items)
        told = {"warnings": warnings, "truncated_tokens": num_truncated}
        return {name: value for name, value in told.items() if value}


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowReader:
    """Makes rows of lines; what is wrong with one becomes its error."""

    task: str
    opened: AnyTask
    parameters: dict[str, Any]

    def read(self, number: int, line: bytes) -> _Row:
        row = _Row(passed={})
        try:
            fields = _parse(number, line)
            row.passed = {"id": fields["id"]} if "id" in fields else {}
            request = self._request(fields)
            row.is_list = isinstance(request.inputs, list)
            row.items = prepare_request(self.opened, request)
        except AlbertServeError as error:
            row.error = error
        return row

    def _request(self, fields: dict[str, Any]) -> TaskRequest:
        given = fields.get("parameters") or {}
        parameters = {**self.parameters, **given} if isinstance(given, dict) else given
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
            names = " and ".join(_FIELDS[self.task])
            raise InvalidInputError(f"the row has neither inputs nor {names}")
        return item["text"] if self.task == "fill-mask" else item


def _checked(task: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        checked = TASKS[task].parameters.model_validate(dict(parameters))
    except ValidationError as error:
        raise InvalidInputError(f"parameters: {describe(error)}") from error
    return checked.model_dump(exclude_unset=True)


def _parse(number: int, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise MalformedRequestError(f"line {number} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedRequestError(f"line {number} is not a JSON object")
    return fields


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _answer(engine: Runner, rows: Sequence[_Row]) -> None:
    """Run what the rows ask for, like lengths together, and finish each item when it can be."""
    places = [
        _Place(row=row, item=number, part=part, given=given)
        for row in rows
        for number, item in enumerate(row.items)
        for part, given in enumerate(item.inputs)
    ]
    parts: dict[tuple[int, int], dict[int, Logits]] = {}
    for group in _group(places, engine.max_batch_tokens):
        for place, outcome in zip(group, _run(engine, [p.given for p in group]), strict=True):
            if isinstance(outcome, AlbertServeError):
                place.row.error = place.row.error or outcome
                continue
            arrived = parts.setdefault((id(place.row), place.item), {})
            arrived[place.part] = outcome
            if len(arrived) == len(place.row.items[place.item].inputs):
                # At once, for a fill-mask's logits are as wide as the vocabulary.
                _finish(place.row, place.item, parts.pop((id(place.row), place.item)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where an input's logits belong: which part of which item of which row."""

    row: _Row
    item: int
    part: int
    given: EncoderInput


def _finish(row: _Row, number: int, arrived: Mapping[int, Logits]) -> None:
    try:
        logits = [arrived[part] for part in range(len(arrived))]
        row.answers[number] = row.items[number].finish(logits)
    except AlbertServeError as error:
        row.error = row.error or error


def _group(places: Iterable[_Place], max_tokens: int) -> Iterator[list[_Place]]:
    """The longest first, in groups whose number times longest length keeps to the budget."""
    group: list[_Place] = []
    for place in sorted(places, key=lambda place: -len(place.given.ids)):
        if group and (len(group) + 1) * len(group[0].given.ids) > max_tokens:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _run(engine: Runner, inputs: Sequence[EncoderInput]) -> list[Logits | AlbertServeError]:
    """Logits of each input, or why it has none: halved until the failing ones are alone."""
    try:
        return list(engine.run(inputs))
    except AlbertServeError as error:
        if len(inputs) == 1:
            return [error]
    half = len(inputs) // 2
    return _run(engine, inputs[:half]) + _run(engine, inputs[half:])


def _lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, each with its number from 1."""
    try:
        with _open_to_read(source) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise InvalidInputError(f"{source} is damaged or incomplete: {error}") from error


@contextmanager
def _appearing(output: Path) -> Iterator[TextIO]:
    """A file to write that takes its name once it is complete, and is `.partial` until then."""
    partial = output.with_name(output.name + ".partial")
    with _open_to_write(partial, output.suffix) as stream:
        yield stream
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(output)


def _open_to_read(path: Path) -> gzip.GzipFile | lzma.LZMAFile | BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path)
    return lzma.open(path) if path.suffix == ".xz" else path.open("rb")


def _open_to_write(path: Path, suffix: str) -> TextIO:
    # JSON's own escape for half of a surrogate pair, which an id may hold.
    encoding, errors = "utf-8", "backslashreplace"
    if suffix == ".gz":
        return gzip.open(path, "wt", encoding=encoding, errors=errors)
    if suffix == ".xz":
        return lzma.open(path, "wt", encoding=encoding, errors=errors)
    return path.open("w", encoding=encoding, errors=errors)
