"""Labelled texts, and pairs of texts, from CSV, TSV, JSONL and Parquet files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from albert_serve.bundle.manifest import ProblemType
from training.data.corpus import CorpusError, read_lines
from training.data.labelled.cells import LabelFormError, cell_text, is_blank, labels_in
from training.data.labelled.columns import COMMON_COLUMNS, ColumnNames, Columns, read_columns
from training.data.labelled.errors import raise_listed
from training.data.labelled.tables import Record, RowError, gather_rows

# The one name of a file's only split.
_ONLY: Final = "data"

# The index of a label; of a regression the score; of several labels 1 or 0 for each.
Label: TypeAlias = int | float | tuple[float, ...]
# The least and the highest score of a regression.
Scale: TypeAlias = tuple[float, float]
ANY_SCORE: Final[Scale] = (-math.inf, math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledText:
    """A text, or a pair of texts, and its label.

    Attributes:
        place: file and line, for messages.
    """

    text: str
    pair: str | None
    label: Label
    place: str = ""


class LabelledSplits(NamedTuple):
    """The texts of each split, and the names of their labels in order."""

    texts: Mapping[str, list[LabelledText]]
    names: list[str]


class _Row(NamedTuple):
    text: str
    pair: str | None
    labels: tuple[str, ...]
    place: str


def read_labelled(
    files: Sequence[Path],
    label_names: Sequence[str] | None = None,
    columns: Columns = COMMON_COLUMNS,
    problem: ProblemType = "single_label_classification",
) -> tuple[list[LabelledText], list[str]]:
    """Read the examples of classification files, and the names of the labels in order.

    As `read_splits` of one split.

    Raises:
        CorpusError: as `read_splits`.
    """
    splits = read_splits({_ONLY: files}, label_names, columns, problem)
    return splits.texts[_ONLY], splits.names


def read_splits(
    files: Mapping[str, Sequence[Path]],
    label_names: Sequence[str] | None = None,
    columns: Columns = COMMON_COLUMNS,
    problem: ProblemType = "single_label_classification",
    scale: Scale = ANY_SCORE,
) -> LabelledSplits:
    """Read the files of a data set's splits, and the names of the labels in order.

    The suffix of a file gives the format: `.tsv`, `.csv` or `.jsonl`, optionally with `.gz`,
    `.bz2`, `.xz` or `.zst`; or `.parquet`. Columns are `text` (or `sentence`, `sentence1`), for
    pairs `text_pair` (or `sentence2`), and `label` (or `category`), or those that `columns` names.
    Several labels of a text stand in a list, or as `columns` says.

    Args:
        files: of each split, the training split first; read one after the other.
        label_names: names of the labels 0, 1, ... of the files; or the labels themselves, in the
            order of the model's outputs. By default the labels of the first split, sorted (2
            before 10), or the columns of 0 and 1.
        problem: of a regression, labels are numbers; of several labels, a text may have none.
        scale: of a regression.

    Raises:
        CorpusError: files cannot be read or lack columns, a split is empty, labels are not among
            the names or the scale, or a label of another split is in no row of the first; all of
            it is listed.
    """
    _check_columns(columns, label_names, problem)
    errors: list[str] = []
    rows = {
        split: gather_rows(
            its, lambda file: _labelled_rows(file, columns, problem), "examples", errors
        )
        for split, its in files.items()
    }
    if problem == "regression":
        splits = LabelledSplits(_scored(rows, scale, errors), list(label_names or ["score"]))
    else:
        names = label_names or columns.indicators
        splits = LabelledSplits(*_classified(rows, names, errors, problem))
    raise_listed(errors)
    return splits


def _scored(
    rows: Mapping[str, list[_Row]], scale: Scale, errors: list[str]
) -> dict[str, list[LabelledText]]:
    """Return the texts of each split with their scores; append the errors."""
    least, most = scale
    allowed = "a number" if scale == ANY_SCORE else f"a number from {least:g} to {most:g}"
    texts: dict[str, list[LabelledText]] = {split: [] for split in rows}
    for split, its_rows in rows.items():
        for row in its_rows:
            (label,) = row.labels
            try:
                score = float(label)
            except ValueError:
                score = math.nan
            if math.isfinite(score) and least <= score <= most:
                texts[split].append(_labelled(row, score))
            else:
                errors.append(f"{row.place}: {label!r} is not {allowed}")
    return texts


def _check_columns(
    columns: Columns, label_names: Sequence[str] | None, problem: ProblemType
) -> None:
    if columns.has_several_labels and problem != "multi_label_classification":
        raise CorpusError(
            "--label-separator, and several columns of --label-column, are for texts with several "
            f"labels (multi_label_classification); this is {problem}"
        )
    if problem == "regression" and label_names is not None and len(label_names) != 1:
        raise CorpusError(f"a regression has one score; {len(label_names)} labels are named")
    if columns.indicators and label_names and set(columns.indicators) != set(label_names):
        raise CorpusError(
            f"--label-column {' '.join(columns.indicators)}: the labels are "
            f"{', '.join(label_names)}; give the column of each"
        )


def _classified(
    rows: Mapping[str, list[_Row]],
    label_names: Sequence[str] | None,
    errors: list[str],
    problem: ProblemType,
) -> tuple[dict[str, list[LabelledText]], list[str]]:
    """Return the texts of each split with the indices of their labels; append the errors."""
    first, *others = rows
    labels = _all_labels(rows[first])
    names = list(label_names or sorted(labels, key=_natural))
    by_label = _indices(names, labels)
    errors += _unknown_labels(rows[first], by_label, f"allowed are {', '.join(names)}")
    trained = {by_label[label] for label in labels & by_label.keys()}
    shown = ", ".join(names[index] for index in sorted(trained))
    numbers = None if problem == "single_label_classification" else len(names)
    texts = {first: _with_labels(rows[first], by_label, numbers)}
    for split in others:
        every, its_labels = by_label, _all_labels(rows[split])
        if label_names and every.keys().isdisjoint(its_labels):
            every = _indices(names, its_labels)  # 0 and 1, say, where the others have names
        known = {label: index for label, index in every.items() if index in trained}
        if trained:
            errors += _unknown_labels(rows[split], known, f"the {first} split has {shown}")
        texts[split] = _with_labels(rows[split], known, numbers)
    return texts, names


def _all_labels(rows: Sequence[_Row]) -> set[str]:
    return set(chain.from_iterable(row.labels for row in rows))


def _with_labels(
    rows: Sequence[_Row], by_label: Mapping[str, int], num_labels: int | None
) -> list[LabelledText]:
    """Return the texts whose labels are all known.

    Args:
        num_labels: of texts with several labels; None where each has one.
    """
    texts = []
    for row in rows:
        if not by_label.keys() >= set(row.labels):
            continue
        chosen = {by_label[label] for label in row.labels}
        label: Label = (
            by_label[row.labels[0]]
            if num_labels is None
            else tuple(float(index in chosen) for index in range(num_labels))
        )
        texts.append(_labelled(row, label))
    return texts


def _indices(names: Sequence[str], labels: set[str]) -> dict[str, int]:
    """Return the index of each label: of its name, or of its number where no name is another's."""
    by_name = {name: index for index, name in enumerate(names)}
    if _has_others_numbers(names):
        return by_name
    by_number = {str(index): index for index in range(len(names))}
    # Whichever knows more of the labels, so that one that is wrong is listed alone.
    return max(by_name, by_number, key=lambda known: len(known.keys() & labels))


def _has_others_numbers(names: Sequence[str]) -> bool:
    """Whether a name is the index of another label, as of labels from 1 to 5."""
    numbers = list(map(str, range(len(names))))
    return any(name in numbers and numbers[index] != name for index, name in enumerate(names))


def _unknown_labels(
    rows: Sequence[_Row], by_label: Mapping[str, int], expectation: str
) -> list[str]:
    """Return an error for each label that is not known, with its first row."""
    unknown: dict[str, list[str]] = {}
    for row in rows:
        for label in row.labels:
            if label not in by_label:
                unknown.setdefault(label, []).append(row.place)
    return [
        f"{places[0]}: label {label!r} ({len(places):,} rows); {expectation}"
        for label, places in unknown.items()
    ]


def _labelled(row: _Row, label: Label) -> LabelledText:
    return LabelledText(text=row.text, pair=row.pair, label=label, place=row.place)


def read_texts(
    files: Sequence[Path],
    columns: Columns = COMMON_COLUMNS,
) -> list[tuple[str, str | None]]:
    """Read the texts, or pairs of texts, of classification files, without their labels.

    Files are as for `read_labelled`, but need no column of labels; or `.txt`, one text per line.

    Raises:
        CorpusError: a file cannot be read or has no column of texts, or there is no text.
    """
    errors: list[str] = []
    texts = gather_rows(files, lambda file: _read_texts(file, columns), "texts", errors)
    raise_listed(errors)
    return texts


def _read_texts(file: Path, columns: Columns) -> Iterator[tuple[str, str | None] | RowError]:
    if ".txt" in file.suffixes and columns.delimiter is None:
        yield from ((line.strip(), None) for line in read_lines(file) if line.strip())
        return
    for read in read_columns(file, columns, needs_label=False):
        if isinstance(read, RowError):
            yield read
            continue
        row, names = read
        texts = _texts(row, names, columns)
        if texts is None and columns.short_rows == "keep":
            pair = None if names.pair is None else cell_text(row.values[names.pair]) or ""
            texts = cell_text(row.values[names.text]) or "", pair
        yield RowError(f"{row.place}: no text") if texts is None else texts


def _labelled_rows(file: Path, columns: Columns, problem: ProblemType) -> Iterator[_Row | RowError]:
    """Yield each row, or the error of a row; report the rows that are left out."""
    num_left_out = 0
    for read in read_columns(file, columns, needs_label=True):
        if isinstance(read, RowError):
            yield read
            continue
        row, names = read
        texts = _texts(row, names, columns)
        try:
            labels = labels_in(row.values, names.labels, columns, problem)
        except ValueError as error:
            yield RowError(f"{row.place}: {error}")
            if isinstance(error, LabelFormError):
                return  # it is the same in all rows
            continue
        if texts is not None and labels is not None:
            yield _Row(*texts, labels, row.place)
        elif columns.short_rows == "leave out":
            num_left_out += 1
        elif texts is None:
            yield RowError(f"{row.place}: no text")
        else:
            yield RowError(f"{row.place}: no value in column {' or '.join(names.labels)}")
    if num_left_out:
        print(f"{file}: {num_left_out:,} rows without a text or a label are left out")


def _texts(row: Record, names: ColumnNames, columns: Columns) -> tuple[str, str | None] | None:
    """Return the text and the pair of a record; None without a text, or a pair that it needs."""
    text, pair = cell_text(row.values[names.text]), None
    if names.pair is not None and (columns.needs_pair or not is_blank(row.values[names.pair])):
        pair = cell_text(row.values[names.pair])
        text = None if pair is None else text
    return None if text is None else (text, pair)


def _natural(label: str) -> tuple[bool, int, str]:
    """Return a sort key: numbers by their value, before other labels."""
    return (not label.isdecimal(), int(label) if label.isdecimal() else 0, label)
