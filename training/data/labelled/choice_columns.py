"""Columns of multiple choice: those that are named, or those that data sets commonly have.

The choices are one column with a list of them (`choices`), or a column for each (`ending0`,
`ending1`, ...).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from training.data.corpus import CorpusError
from training.data.labelled.columns import Columns, LackingColumnsError, read_with_columns
from training.data.labelled.tables import Record, RowError

# Pairs of columns of the context and the question: RACE's and others', SWAG's, COPA's, HellaSwag's.
# A question without a context is read as one.
_TEXTS: Final = (
    ("context", "question"),
    ("article", "question"),
    ("passage", "question"),
    ("sent1", "sent2"),
    ("premise", "question"),
    ("ctx_a", "ctx_b"),
    ("prompt", None),
    ("question", None),
    ("question_stem", None),
    ("text", None),
)
_LISTS: Final = ("choices", "options", "endings")
_NUMBERED: Final = re.compile(r"(?:ending|choice|option|answer|candidate)_?(?:\d+|[A-H])")
_LABELS: Final = ("label", "answer", "answerKey")
# A record of RACE, whose one passage has several questions.
_RACE: Final = frozenset({"article", "questions", "options", "answers"})


class ChoiceColumns(NamedTuple):
    """The columns of a record's context, question, answer and choices.

    Attributes:
        listed: the column of the list of choices; None if each choice has a column.
        numbered: the columns of the choices, in order.
    """

    context: str
    question: str | None
    label: str
    listed: str | None
    numbered: tuple[str, ...] = ()


def read_choice_columns(
    file: Path, columns: Columns, choices: Sequence[str]
) -> Iterator[RowError | tuple[Record, ChoiceColumns | None]]:
    """Yield the records of a file with their columns; None as those of a record of RACE.

    Where records lack columns, there is one error.

    Args:
        choices: names of the columns of the choices, or of the one with the list; if any.

    Raises:
        CorpusError: the columns are of several labels.
    """
    if columns.has_several_labels:
        raise CorpusError(
            "multiple choice has one right choice: give one --label-column, and no "
            "--label-separator"
        )
    return read_with_columns(file, columns.table_format, lambda row: _find(row, columns, choices))


def _find(row: Record, columns: Columns, choices: Sequence[str]) -> ChoiceColumns | None:
    """Return the columns of a record; None for one of RACE.

    Raises:
        LackingColumnsError: some are missing.
    """
    keys = list(row.values)
    if not choices and set(keys) >= _RACE:
        return None
    asked = {
        "--text-column": columns.text,
        "--pair-column": columns.pair,
        "--label-column": columns.label,
    }
    lacks = [
        f"no column {name} for {option}"
        for option, name in asked.items()
        if name is not None and name not in keys
    ]
    lacks += [f"no column {name} for --choice-columns" for name in choices if name not in keys]
    texts = _texts(keys, columns)
    label = columns.label or next((name for name in _LABELS if name in keys), None)
    listed, numbered = _choices(row, keys, choices)
    if texts is None and columns.text is None:
        lacks.append("no column context, sent1 or question (--text-column names another)")
    if label is None:
        lacks.append("no column label or answer (--label-column names another)")
    if listed is None and not numbered:
        lacks.append("no column choices, nor ending0, ending1, ... (--choice-columns names others)")
    if lacks or texts is None or label is None:
        raise LackingColumnsError("; ".join(lacks))
    return ChoiceColumns(*texts, label, listed, numbered)


def _texts(keys: Sequence[str], columns: Columns) -> tuple[str, str | None] | None:
    """Return the columns of the context and, where there is one, of the question."""
    if columns.text is not None:
        return columns.text, columns.pair
    for context, question in _TEXTS:
        if context in keys:
            return context, columns.pair or (question if question in keys else None)
    return None


def _choices(
    row: Record, keys: Sequence[str], asked: Sequence[str]
) -> tuple[str | None, tuple[str, ...]]:
    """Return the column of a list of choices, or the columns of the choices."""
    if len(asked) > 1:
        return None, tuple(asked)
    for name in asked or _LISTS:
        if name in keys and isinstance(row.values[name], list | dict):
            return name, ()
    return None, tuple(asked or (name for name in keys if _NUMBERED.fullmatch(name)))
