"""Columns of labelled files: those that are named, or those that data sets commonly have.

The choices of multiple choice are one column with a list of them (`choices`), or a column for each
(`ending0`, `ending1`, ...).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from albert_serve.errors import InvalidInputError
from albert_serve.tables import Row
from albert_serve.tables.columns import (
    ANSWERS,
    CHOICES,
    CONTEXTS,
    LABELS,
    PAIRS,
    SINGLES,
    TextColumns,
    find_column,
    find_name,
    find_texts,
)
from albert_serve.tables.delimited import likely_delimiter
from training.data.corpus import CorpusError
from training.data.labelled.rows import read_records

_NUMBERED: Final = re.compile(r"(?:ending|choice|option|answer|candidate)_?(?:\d+|[A-H])")
# A record of RACE, whose one passage has several questions.
_RACE: Final = frozenset({"article", "questions", "options", "answers"})
_USUAL_CHOICES: Final = "choices, nor ending0, ending1, ..."


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns to read, by name; None for those that data sets commonly have.

    Attributes:
        delimiter: of CSV and TSV files; None to detect it.
        needs_pair: whether each row needs a second text.
        headerless: names of the columns of CSV and TSV files that may lack a header.
        indicators: columns of 0 and 1, one for each label, in place of `label`.
        separator: of several labels in the column `label`.
    """

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    delimiter: str | None = None
    needs_pair: bool = False
    headerless: tuple[str, ...] = ()
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
    """The columns of a record.

    Attributes:
        text: of the text, or of the context of a question.
        pair: of the second text, or of the question.
        labels: several if each label has its own.
        choices: the column of each choice, or the one with the list of them.
    """

    text: str
    pair: str | None
    labels: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


class _Known(NamedTuple):
    """The columns that data sets commonly have, and examples of them for an error."""

    texts: Sequence[TextColumns]
    labels: Sequence[str]
    usual_text: str
    usual_label: str


_ANY_TEXTS: Final = _Known(
    (*PAIRS, *SINGLES), LABELS, "text or sentence or sentence1", "label or category"
)
_PAIRED_TEXTS: Final = _Known(
    PAIRS, LABELS, "of a second text, such as sentence1 and sentence2", "label or category"
)
_QUESTIONS: Final = _Known(CONTEXTS, ANSWERS, "context, sent1 or question", "label or answer")


class _LackingColumnsError(ValueError):
    """A record lacks columns; the message names them."""


def read_columns(
    file: Path, columns: Columns, errors: list[str], *, needs_label: bool
) -> Iterator[tuple[Row, ColumnNames]]:
    """Yield the records of a file with their columns; append one error where records lack some."""
    known = _PAIRED_TEXTS if columns.needs_pair else _ANY_TEXTS
    if not needs_label:
        known = known._replace(labels=())
    return _read_with(file, columns, errors, lambda row: _find(row, columns, known))


def read_choice_columns(
    file: Path, columns: Columns, choices: Sequence[str], errors: list[str]
) -> Iterator[tuple[Row, ColumnNames | None]]:
    """Yield the records of a file with their columns, as above; None for a record of RACE."""
    if columns.has_several_labels:
        raise CorpusError(
            "multiple choice has one right choice: give one --label-column, and no "
            "--label-separator"
        )

    def find(row: Row) -> ColumnNames | None:
        is_race = not choices and row.values.keys() >= _RACE
        return None if is_race else _find(row, columns, _QUESTIONS, choices)

    return _read_with(file, columns, errors, find)


_NamesT = TypeVar("_NamesT", bound=ColumnNames | None)


def _read_with(
    file: Path, columns: Columns, errors: list[str], find: Callable[[Row], _NamesT]
) -> Iterator[tuple[Row, _NamesT]]:
    """Yield the records of a file with their columns; one error for those that lack the same.

    Args:
        find: called once for records that have the same keys; rows of JSONL may have others.
    """
    names_of: dict[tuple[str, ...], list[_NamesT]] = {}
    for row in read_records(file, errors, columns.delimiter, columns.names_by_order):
        keys = tuple(row.values)
        if keys not in names_of:
            names_of[keys] = []
            try:
                names_of[keys].append(find(row))
            except InvalidInputError as error:  # columns that differ only in case
                errors.append(f"{row.header}: {error}")
            except _LackingColumnsError as error:
                errors.append(f"{row.header}: {error}; {_describe(row)}")
        for names in names_of[keys]:
            yield row, names


def _describe(row: Row) -> str:
    keys = list(map(str, row.values))
    delimiter = likely_delimiter(keys[0]) if len(keys) == 1 else None
    advice = f"; is its delimiter {delimiter!r}? Give --delimiter" if delimiter else ""
    return f"its columns are {', '.join(keys)}{advice}"


def _find(
    row: Row, columns: Columns, known: _Known, choices: Sequence[str] | None = None
) -> ColumnNames:
    """Return the columns of a record: those that are named, or the known ones.

    Args:
        choices: the names of the choices' columns, if any; None where there are no choices.
    """
    keys, has_label = row.values, bool(known.labels)
    own = columns.indicators or (() if columns.label is None else (columns.label,))
    named = [("text-column", columns.text), ("pair-column", columns.pair)]
    named += [("label-column", name) for name in own if has_label]
    named += [("choice-columns", name) for name in choices or ()]
    texts = find_texts(keys, known.texts, columns.text, columns.pair)
    labels = [find_name(keys, name) for name in own] or [find_column(keys, known.labels)]
    answers = () if choices is None else _choice_columns(row, choices)
    lacks = [
        f"no column {name} for --{option}"
        for option, name in named
        if name is not None and find_name(keys, name) is None
    ] or [
        f"no column {usual} (--{option} names another)"
        for is_missing, usual, option in (
            (texts is None, known.usual_text, "text-column"),
            (has_label and None in labels, known.usual_label, "label-column"),
            (answers == () and choices is not None, _USUAL_CHOICES, "choice-columns"),
        )
        if is_missing
    ]
    if lacks or texts is None:
        raise _LackingColumnsError("; ".join(lacks))
    return ColumnNames(*texts, tuple(filter(None, labels)) if has_label else (), answers)


def _choice_columns(row: Row, asked: Sequence[str]) -> tuple[str, ...]:
    """Return the column of a list of choices, or the columns of the choices."""
    if len(asked) > 1:
        return tuple(asked)
    for name in asked or CHOICES:
        column = find_name(row.values, name)
        if column is not None and isinstance(row.values[column], list | dict):
            return (column,)
    return tuple(asked) or tuple(filter(_NUMBERED.fullmatch, row.values))
