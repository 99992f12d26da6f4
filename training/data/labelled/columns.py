"""Columns of labelled files: those that are named, or those that data sets commonly have.

The choices of multiple choice are one column with a list of them (`choices`), or a column for each
(`ending0`, `ending1`, ...).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from albert_serve.errors import InvalidInputError
from albert_serve.names import find_name
from albert_serve.tables import Row
from albert_serve.tables.columns import (
    ANSWERS,
    CHOICES,
    CONTEXTS,
    LABELS,
    PAIRS,
    SINGLES,
    find_column,
    find_texts,
)
from albert_serve.tables.delimited import likely_delimiter
from training.data.corpus import CorpusError
from training.data.labelled.tables import RowError, read_records

_NUMBERED: Final = re.compile(r"(?:ending|choice|option|answer|candidate)_?(?:\d+|[A-H])")
# A record of RACE, whose one passage has several questions.
_RACE: Final = frozenset({"article", "questions", "options", "answers"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns to read, by name; None for those that data sets commonly have.

    Attributes:
        delimiter: of CSV and TSV files; None to detect it.
        needs_pair: whether each row needs a second text.
        headerless: names of the columns of CSV and TSV files that may lack a header.
        indicators: columns of 0 and 1, one for each label, in place of `label`.
        separator: of several labels in the column `label`.
        keeps_empty_texts: whether rows with an empty text are kept where texts are read without
            labels.
    """

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    delimiter: str | None = None
    needs_pair: bool = False
    headerless: tuple[str, ...] = ()
    keeps_empty_texts: bool = False
    indicators: tuple[str, ...] = ()
    separator: str | None = None

    @property
    def has_several_labels(self) -> bool:
        """Whether a row can have several labels."""
        return bool(self.indicators) or self.separator is not None

    def names_by_order(self, first: Sequence[str]) -> Sequence[str]:
        """Return the columns of a file without a header by its first row; none if it is one."""
        return self.headerless if set(first).isdisjoint(self.headerless) else ()


# Data sets commonly use these names.
COMMON_COLUMNS: Final = Columns()


class ColumnNames(NamedTuple):
    """The columns of a record's text, second text and labels: several if each has its own."""

    text: str
    pair: str | None
    labels: tuple[str, ...] = ()


class ChoiceColumns(NamedTuple):
    """The columns of a record's context, question, answer and choices.

    Attributes:
        choices: the column of each choice, or the one with the list of them.
    """

    context: str
    question: str | None
    label: str
    choices: tuple[str, ...]


class _LackingColumnsError(ValueError):
    """A record lacks columns; the message names them."""


_Names = TypeVar("_Names")


def read_columns(
    file: Path, columns: Columns, *, needs_label: bool
) -> Iterator[RowError | tuple[Row, ColumnNames]]:
    """Yield the records of a file with their columns; one error where records lack some."""

    def find(row: Row) -> ColumnNames:
        known = PAIRS if columns.needs_pair else [*PAIRS, *SINGLES]
        texts = find_texts(row.values, known, columns.text, columns.pair)
        usual = "text or sentence or sentence1"
        if columns.needs_pair:
            usual = "of a second text, such as sentence1 and sentence2"
        labels = _label_columns(row.values, columns, LABELS)
        asked = _asked(columns, needs_label=needs_label)
        lacks = _lacking(row.values, asked) or [
            *([] if texts else [_unknown("text", usual)]),
            *([] if labels or not needs_label else [_unknown("label", "label or category")]),
        ]
        if lacks or texts is None:
            raise _LackingColumnsError("; ".join(lacks))
        return ColumnNames(*texts, labels if needs_label else ())

    return _read_with(file, columns, find)


def read_choice_columns(
    file: Path, columns: Columns, choices: Sequence[str]
) -> Iterator[RowError | tuple[Row, ChoiceColumns | None]]:
    """Yield the records of a file with their columns; None for a record of RACE.

    Where records lack columns, there is one error.
    """
    if columns.has_several_labels:
        raise CorpusError(
            "multiple choice has one right choice: give one --label-column, and no "
            "--label-separator"
        )

    def find(row: Row) -> ChoiceColumns | None:
        if not choices and row.values.keys() >= _RACE:
            return None
        texts = find_texts(row.values, CONTEXTS, columns.text, columns.pair)
        labels = _label_columns(row.values, columns, ANSWERS)
        names = _choice_columns(row, choices)
        asked = [*_asked(columns, needs_label=True)]
        asked += [("choice-columns", name) for name in choices]
        lacks = _lacking(row.values, asked) or [
            *([] if texts else [_unknown("text", "context, sent1 or question")]),
            *([] if labels else [_unknown("label", "label or answer")]),
            *([] if names else [_unknown("choice", "choices, nor ending0, ending1, ...")]),
        ]
        if lacks or texts is None:
            raise _LackingColumnsError("; ".join(lacks))
        return ChoiceColumns(*texts, labels[0], names)

    return _read_with(file, columns, find)


def _read_with(
    file: Path, columns: Columns, find: Callable[[Row], _Names]
) -> Iterator[RowError | tuple[Row, _Names]]:
    """Yield the records of a file with their columns; one error for those that lack the same.

    Args:
        find: returns the columns of a record, or raises _LackingColumnsError; called once for
            records that have the same keys.
    """
    # Rows of JSONL may have different keys.
    names_of: dict[tuple[str, ...], _Names | RowError] = {}
    for row in read_records(file, columns.delimiter, columns.names_by_order):
        if isinstance(row, RowError):
            yield row
            continue
        keys = tuple(row.values)
        is_new = keys not in names_of
        if is_new:
            names_of[keys] = _found(row, find)
        names = names_of[keys]
        if not isinstance(names, RowError):
            yield row, names
        elif is_new:
            yield names


def _found(row: Row, find: Callable[[Row], _Names]) -> _Names | RowError:
    try:
        return find(row)
    except InvalidInputError as error:  # columns that differ only in case
        return RowError(f"{row.header}: {error}")
    except _LackingColumnsError as error:
        keys = list(map(str, row.values))
        delimiter = likely_delimiter(keys[0]) if len(keys) == 1 else None
        advice = f"; is its delimiter {delimiter!r}? Give --delimiter" if delimiter else ""
        return RowError(f"{row.header}: {error}; its columns are {', '.join(keys)}{advice}")


def _asked(columns: Columns, *, needs_label: bool) -> list[tuple[str, str]]:
    """Return the options that name columns, with each name."""
    labels = (columns.label, *columns.indicators) if needs_label else ()
    named = [("text-column", columns.text), ("pair-column", columns.pair)]
    named += [("label-column", name) for name in labels]
    return [(option, name) for option, name in named if name is not None]


def _lacking(keys: Mapping[str, object], asked: Sequence[tuple[str, str]]) -> list[str]:
    return [
        f"no column {name} for --{option}"
        for option, name in asked
        if find_name(keys, name) is None
    ]


def _unknown(kind: str, usual: str) -> str:
    option = "choice-columns" if kind == "choice" else f"{kind}-column"
    return f"no column {usual} (--{option} names another)"


def _label_columns(
    keys: Mapping[str, object], columns: Columns, known: Sequence[str]
) -> tuple[str, ...]:
    """Return the column of the label, or the columns of 0 and 1; all must be there."""
    if columns.indicators:
        names = [find_name(keys, name) for name in columns.indicators]
        return tuple(name for name in names if name is not None)
    label = find_column(keys, known, columns.label)
    return () if label is None else (label,)


def _choice_columns(row: Row, asked: Sequence[str]) -> tuple[str, ...]:
    """Return the column of a list of choices, or the columns of the choices."""
    if len(asked) > 1:
        return tuple(asked)
    for name in asked or CHOICES:
        column = find_name(row.values, name)
        if column is not None and isinstance(row.values[column], list | dict):
            return (column,)
    return tuple(asked) or tuple(filter(_NUMBERED.fullmatch, row.values))
