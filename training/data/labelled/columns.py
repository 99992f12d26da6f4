"""Columns of labelled files: the columns that users request, or the usual columns of data sets.

In multiple choice, the choices are in one column of lists (`choices`), or in a column for each
choice (`ending0`, `ending1`, ...).
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
# Fields of a RACE record, which has several questions about one passage.
_RACE: Final = frozenset({"article", "questions", "options", "answers"})
_USUAL_CHOICES: Final = "choices, nor ending0, ending1, ..."


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names of the columns to read, or None for the usual columns of data sets.

    Attributes:
        text: column of the text, or of the context of a question.
        pair: column of the second text, or of the question.
        label: column of the label.
        delimiter: delimiter of CSV and TSV files, or None to detect it.
        needs_pair: whether each row needs a second text.
        headerless: names for the columns of CSV and TSV files that may have no header.
        indicators: columns of 0 and 1, one for each label, instead of `label`.
        separator: separator between several labels in the column `label`.
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
        """Return `headerless` if the first row is data, or no names if the row is a header."""
        return self.headerless if set(first).isdisjoint(self.headerless) else ()


# The usual columns of data sets.
COMMON_COLUMNS: Final = Columns()


class ColumnNames(NamedTuple):
    """The columns of a record.

    Attributes:
        text: column of the text, or of the context of a question.
        pair: column of the second text, or of the question.
        labels: column of the label, or one column for each label.
        choices: column of each choice, or a single column of lists of choices.
    """

    text: str
    pair: str | None
    labels: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


class _UsualColumns(NamedTuple):
    """The usual columns of data sets, and examples of these columns for error messages."""

    texts: Sequence[TextColumns]
    labels: Sequence[str]
    text_examples: str
    label_examples: str


_ANY_TEXTS: Final = _UsualColumns(
    (*PAIRS, *SINGLES), LABELS, "text or sentence or sentence1", "label or category"
)
_PAIRED_TEXTS: Final = _UsualColumns(
    PAIRS, LABELS, "of a second text, such as sentence1 and sentence2", "label or category"
)
_QUESTIONS: Final = _UsualColumns(
    CONTEXTS, ANSWERS, "context, sent1 or question", "label or answer"
)


class _MissingColumnsError(ValueError):
    """An error that names the columns that a record lacks."""


def read_columns(
    file: Path, columns: Columns, errors: list[str], *, needs_label: bool
) -> Iterator[tuple[Row, ColumnNames]]:
    """Yield a file's records with their columns, or append an error if columns are missing."""
    usual = _PAIRED_TEXTS if columns.needs_pair else _ANY_TEXTS
    if not needs_label:
        usual = usual._replace(labels=())
    return _read_with(file, columns, errors, lambda row: _find(row, columns, usual))


def read_choice_columns(
    file: Path, columns: Columns, choices: Sequence[str], errors: list[str]
) -> Iterator[tuple[Row, ColumnNames | None]]:
    """Yield a file's records with their columns, or with None for a record in RACE's format."""
    if columns.has_several_labels:
        raise CorpusError(
            "Multiple choice has one right choice. Set only one --label-column, and no "
            "--label-separator."
        )

    def find(row: Row) -> ColumnNames | None:
        is_race = not choices and row.values.keys() >= _RACE
        return None if is_race else _find(row, columns, _QUESTIONS, choices)

    return _read_with(file, columns, errors, find)


_NamesT = TypeVar("_NamesT", bound=ColumnNames | None)


def _read_with(
    file: Path, columns: Columns, errors: list[str], find: Callable[[Row], _NamesT]
) -> Iterator[tuple[Row, _NamesT]]:
    """Yield the records of a file with their columns.

    Columns are found once for each set of keys, because rows of JSONL can have different keys.

    Args:
        find: function that returns the columns of a record.
    """
    names_of: dict[tuple[str, ...], list[_NamesT]] = {}
    for row in read_records(file, errors, columns.delimiter, columns.names_by_order):
        keys = tuple(row.values)
        if keys not in names_of:
            names_of[keys] = []
            try:
                names_of[keys].append(find(row))
            except InvalidInputError as error:  # raised if column names differ only in case
                errors.append(f"{row.header}: {error}")
            except _MissingColumnsError as error:
                errors.append(f"{row.header}: {error} {_describe(row)}")
        for names in names_of[keys]:
            yield row, names


def _describe(row: Row) -> str:
    keys = list(map(str, row.values))
    delimiter = likely_delimiter(keys[0]) if len(keys) == 1 else None
    advice = f" Is {delimiter!r} the delimiter? Then set --delimiter." if delimiter else ""
    return f"The columns are {', '.join(keys)}.{advice}"


def _find(
    row: Row, columns: Columns, usual: _UsualColumns, choices: Sequence[str] | None = None
) -> ColumnNames:
    """Return the columns of a record: the requested columns, or the usual columns.

    Args:
        choices: requested columns of the choices, if any, or None if the task has no choices.
    """
    keys, has_label = row.values, bool(usual.labels)
    label_names = columns.indicators or (() if columns.label is None else (columns.label,))
    requested = [("text-column", columns.text), ("pair-column", columns.pair)]
    requested += [("label-column", name) for name in label_names if has_label]
    requested += [("choice-columns", name) for name in choices or ()]
    texts = find_texts(keys, usual.texts, columns.text, columns.pair)
    labels = [find_name(keys, name) for name in label_names] or [find_column(keys, usual.labels)]
    answers = () if choices is None else _choice_columns(row, choices)
    errors = [
        f"no column {name} for --{option}."
        for option, name in requested
        if name is not None and find_name(keys, name) is None
    ] or [
        f"no column {examples}. Set --{option}."
        for is_missing, examples, option in (
            (texts is None, usual.text_examples, "text-column"),
            (has_label and None in labels, usual.label_examples, "label-column"),
            (answers == () and choices is not None, _USUAL_CHOICES, "choice-columns"),
        )
        if is_missing
    ]
    if errors or texts is None:
        raise _MissingColumnsError(" ".join(f"There is {error}" for error in errors))
    return ColumnNames(*texts, tuple(filter(None, labels)) if has_label else (), answers)


def _choice_columns(row: Row, requested: Sequence[str]) -> tuple[str, ...]:
    """Return the column of lists of choices, or the column of each choice."""
    if len(requested) > 1:
        return tuple(requested)
    for name in requested or CHOICES:
        column = find_name(row.values, name)
        if column is not None and isinstance(row.values[column], list | dict):
            return (column,)
    return tuple(requested) or tuple(filter(_NUMBERED.fullmatch, row.values))
