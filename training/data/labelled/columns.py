"""Columns of labelled texts: those that are named, or those that data sets commonly have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar

from training.data.labelled.tables import (
    Record,
    RowError,
    TableFormat,
    likely_delimiter,
    read_records,
)

# Pairs of columns that data sets use, the first that a file has is taken: GLUE's (QNLI before
# the others, since its second column is also the name of a single text), SICK's and MRPC's.
_PAIRS: Final = (
    ("text", "text_pair"),
    ("question", "sentence"),
    ("question1", "question2"),
    ("sentence1", "sentence2"),
    ("sentence_A", "sentence_B"),
    ("premise", "hypothesis"),
    ("#1 String", "#2 String"),
)
_TEXTS: Final = ("text", "sentence", "sentence1", "sentence_A")
_LABELS: Final = (
    "label",
    "category",
    "gold_label",
    "entailment_judgment",
    "Quality",
    "is_duplicate",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns to read, by name; None for those that data sets commonly have.

    Attributes:
        delimiter: of CSV and TSV files; None to detect it.
        pairs: whether each row needs a second text.
        headerless: names of the columns of CSV and TSV files without a header, if there may be
            such; `text` and `label` are then among them.
        indicators: columns of 0 and 1, one for each label, in place of `label`.
        separator: of several labels in the column `label`.
        short_rows: rows without a text or a label are errors, they are left out or, where texts
            are read without labels, kept with empty texts.
        or_common: in files that lack some of the columns, take those that data sets commonly have.
    """

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    delimiter: str | None = None
    pairs: Literal["optional", "required"] = "optional"
    headerless: tuple[str, ...] = ()
    short_rows: Literal["refuse", "leave out", "keep"] = "refuse"
    indicators: tuple[str, ...] = ()
    separator: str | None = None
    or_common: bool = False

    @property
    def has_several_labels(self) -> bool:
        """Whether a row can have several labels."""
        return bool(self.indicators) or self.separator is not None

    @property
    def table_format(self) -> TableFormat:
        """The properties of CSV and TSV files."""
        columns = (self.text, self.pair, self.label, *self.indicators)
        named = tuple(name for name in columns if name is not None)
        return TableFormat(delimiter=self.delimiter, headerless=self.headerless, named=named)


# Those that data sets commonly have.
COMMON_COLUMNS: Final = Columns()


class ColumnNames(NamedTuple):
    """The columns of a record's text, second text and labels: several if each has its own."""

    text: str
    pair: str | None
    labels: tuple[str, ...] = ()


class LackingColumnsError(ValueError):
    """A record lacks columns; the message names them."""


_Names = TypeVar("_Names")


def read_with_columns(
    file: Path, form: TableFormat, find: Callable[[Record], _Names]
) -> Iterator[RowError | tuple[Record, _Names]]:
    """Yield the records of a file with their columns; one error for those that lack the same.

    Args:
        find: returns the columns of a record, or raises LackingColumnsError; called once for
            records that have the same keys.
    """
    # Rows of JSONL may have different keys.
    names_of: dict[tuple[str, ...], _Names | RowError] = {}
    for row in read_records(file, form):
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


def _found(row: Record, find: Callable[[Record], _Names]) -> _Names | RowError:
    try:
        return find(row)
    except LackingColumnsError as error:
        keys = list(map(str, row.values))
        delimiter = likely_delimiter(keys[0]) if len(keys) == 1 else None
        advice = f"; is its delimiter {delimiter!r}? Give --delimiter" if delimiter else ""
        return RowError(f"{row.header}: {error}; its columns are {', '.join(keys)}{advice}")


def read_columns(
    file: Path, columns: Columns, *, needs_label: bool
) -> Iterator[RowError | tuple[Record, ColumnNames]]:
    """Yield the records of a file with their columns; one error where records lack some."""
    return read_with_columns(
        file,
        columns.table_format,
        lambda row: _find_columns(list(row.values), columns, needs_label=needs_label),
    )


def _find_columns(keys: Sequence[str], columns: Columns, *, needs_label: bool) -> ColumnNames:
    """Return the columns among a record's keys.

    Raises:
        LackingColumnsError: some are missing.
    """
    texts = _text_columns(keys, columns)
    if texts is not None and texts[1] is None and columns.pairs == "required":
        texts = None
    labels = _label_columns(keys, columns) if needs_label else ()
    if texts is not None and labels is not None:
        return ColumnNames(*texts, labels)
    if columns.or_common:
        with suppress(LackingColumnsError):  # the columns that are named are to be missed
            common = replace(COMMON_COLUMNS, pairs=columns.pairs)
            return _find_columns(keys, common, needs_label=needs_label)
    lacks = []
    if texts is None:
        lacks.append(_missing(keys, _asked_texts(columns), _TEXTS, "text"))
    if labels is None:
        asked = [("label", name) for name in (columns.label, *columns.indicators) if name]
        lacks.append(_missing(keys, asked, _LABELS[:3], "label"))
    raise LackingColumnsError("; ".join(lacks))


def _asked_texts(columns: Columns) -> list[tuple[str, str]]:
    names = (("text", columns.text), ("pair", columns.pair))
    return [(option, name) for option, name in names if name is not None]


def _missing(
    keys: Sequence[str], asked: Sequence[tuple[str, str]], usual: Sequence[str], option: str
) -> str:
    lacks = [
        f"no column {name} for --{name_of}-column" for name_of, name in asked if name not in keys
    ]
    return "; ".join(lacks) or f"no column {' or '.join(usual)} (--{option}-column names another)"


def _text_columns(keys: Sequence[str], columns: Columns) -> tuple[str, str | None] | None:
    """Return the columns of the text and, in a file of pairs, of the second text."""
    if any(name not in keys for _, name in _asked_texts(columns)):
        return None
    if columns.text is not None:
        return columns.text, columns.pair
    for first, second in _PAIRS:
        pair = columns.pair or second
        if first in keys and pair in keys and first != pair:
            return first, pair
    for name in _TEXTS:
        if name in keys and name != columns.pair:
            return name, columns.pair
    return None


def _label_columns(keys: Sequence[str], columns: Columns) -> tuple[str, ...] | None:
    """Return the column of the labels, or those of 0 and 1; None if one is missing."""
    if columns.indicators:
        return columns.indicators if set(columns.indicators) <= set(keys) else None
    usual = (columns.label,) if columns.label is not None else _LABELS
    return next(((name,) for name in usual if name in keys), None)
