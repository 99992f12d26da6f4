"""Labelled texts, and pairs of texts, from CSV, TSV, JSONL and Parquet files, and their tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from albert_serve.bundle.manifest import ProblemType
from albert_serve.errors import TextTooLongError, listed
from albert_serve.progress import progress
from albert_serve.tables import Row
from albert_serve.tasks.truncation import Truncator
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import TokenisedExample
from training.data.corpus import CorpusError
from training.data.labelled.cells import (
    LabelFormatError,
    cell_text,
    finite_number,
    first_spellings,
    is_blank,
    label_indices,
    label_key,
    labels_in,
)
from training.data.labelled.columns import COMMON_COLUMNS, ColumnNames, Columns, read_columns
from training.data.labelled.rows import OmittedRow, gather_rows, print_omitted, raise_listed
from training.glue.files import find_first
from training.glue.tasks import GlueTask

# Data sets such as SNLI write these where there is no label.
_NO_LABEL: Final = frozenset({"-1", "-"})
# More different numbers are asked about: they may be values, and not the names of classes.
_MAX_FRACTIONS: Final = 20
_MAX_INTEGERS: Final = 200

# The index of a label; of a regression the score; of several labels 1 or 0 for each.
Label: TypeAlias = int | float | tuple[float, ...]
# A regression has scores from the first to the second.
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
    """The texts of each split, and the names of their labels in order.

    Attributes:
        are_numbered: whether the first split has the labels' numbers in place of their names.
    """

    texts: Mapping[str, list[LabelledText]]
    names: list[str]
    are_numbered: bool = False


class _Row(NamedTuple):
    """A row with its labels.

    Attributes:
        classes: the names of the labels in order, where the file has them.
    """

    text: str
    pair: str | None
    labels: tuple[str, ...]
    place: str
    classes: Sequence[str]


def read_splits(
    files: Mapping[str, Sequence[Path]],
    label_names: Sequence[str] | None = None,
    columns: Columns = COMMON_COLUMNS,
    problem: ProblemType | None = "single_label_classification",
    scale: Scale = ANY_SCORE,
) -> LabelledSplits:
    """Read the files of a data set's splits, and the names of the labels in order.

    Formats are those of `read_records`. Columns are `text` (or `sentence`, `sentence1`), for pairs
    `text_pair` (or `sentence2`), and `label` (or `category`), in any case, or those that `columns`
    names. Several labels of a text stand in a list, or as `columns` says. Rows without a label, of
    which one line tells, are left out: it is empty or, where no label has that name, -1 or "-". So
    are rows with an empty text, or of spaces alone.

    Args:
        files: of each split, the training split first; read one after the other.
        label_names: names of the labels 0, 1, ... of the files; or the labels themselves, in the
            order of the model's outputs. By default those that the files name (a ClassLabel of
            `datasets`), the labels of the first split, sorted (2 before 10), or the columns of 0
            and 1; each in its first spelling.
        problem: of a regression, labels are numbers; of several labels, a text may have none. None
            for one label a text, unless labels are many numbers, which is an error.
        scale: of a regression.
    """
    kind = problem or "single_label_classification"
    _check_columns(columns, label_names, kind)
    errors: list[str] = []
    rows = {
        split: gather_rows(
            its,
            lambda file: _labelled_rows(file, columns, kind, label_names or (), errors),
            "examples",
            errors,
        )
        for split, its in files.items()
    }
    if problem is None and not label_names:
        errors += _many_numbers(next(iter(rows.values())))
    if problem == "regression":
        splits = LabelledSplits(_scored(rows, scale, errors), list(label_names or ["score"]))
    else:
        names = label_names or columns.indicators
        splits = _classified(rows, names, errors, kind)
    raise_listed(errors)
    return splits


def _many_numbers(rows: Sequence[_Row]) -> list[str]:
    """Return an error if the labels are more numbers than classes are likely to be."""
    labels = _all_labels(rows)
    try:
        numbers = list(map(float, labels))
    except ValueError:
        return []
    most = _MAX_INTEGERS if all(map(float.is_integer, numbers)) else _MAX_FRACTIONS
    if len(labels) <= most or any(row.classes for row in rows):
        return []
    message = (
        f"the labels are {len(labels):,} numbers from {min(numbers):g} to {max(numbers):g}; give "
        "--problem-type regression for values, or --problem-type single_label_classification for "
        "classes"
    )
    return [message]


def _scored(
    rows: Mapping[str, list[_Row]], scale: Scale, errors: list[str]
) -> dict[str, list[LabelledText]]:
    """Return the texts of each split with their scores; append the errors.

    Rows of score -1 are left out if no other score is negative: data sets such as STS-B have it
    where there is no score.
    """
    least, most = scale
    allowed = "a number" if scale == ANY_SCORE else f"a number from {least:g} to {most:g}"
    negative = {row.labels[0] for its in rows.values() for row in its if row.labels[0][:1] == "-"}
    texts: dict[str, list[LabelledText]] = {}
    for split, its_rows in rows.items():
        kept = [row for row in its_rows if negative != {"-1"} or row.labels != ("-1",)]
        if num_left_out := len(its_rows) - len(kept):
            message = print_omitted(num_left_out, len(its_rows), "without a score (-1)")
            errors += [] if kept else [f"There are no examples: {message}"]
        texts[split] = []
        for row in kept:
            (label,) = row.labels
            score = finite_number(label)
            if score is not None and least <= score <= most:
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
    indicators = set(map(label_key, columns.indicators))
    if indicators and label_names and indicators != set(map(label_key, label_names)):
        raise CorpusError(
            f"--label-column {' '.join(columns.indicators)}: the labels are "
            f"{listed(label_names)}; give the column of each"
        )


def _classified(
    rows: Mapping[str, list[_Row]],
    label_names: Sequence[str] | None,
    errors: list[str],
    problem: ProblemType,
) -> LabelledSplits:
    """Return the texts of each split with the indices of their labels; append the errors."""
    first, *others = rows
    labels = _all_labels(rows[first])
    classes = next((row.classes for row in rows[first] if row.classes), ())
    names = list(label_names or first_spellings(classes or labels))
    if not (label_names or classes):
        names.sort(key=_natural)
    find_indices = partial(_indices if label_names else label_indices, names)
    by_label = find_indices(labels)
    errors += _unknown_labels(rows[first], by_label, f"allowed are {listed(names)}")
    trained = set(by_label.values())
    shown = listed([names[index] for index in sorted(trained)])
    numbers = None if problem == "single_label_classification" else len(names)
    texts = {first: _with_labels(rows[first], by_label, numbers)}
    for split in others:
        # A split may have 0 and 1, say, where the others have names.
        every = find_indices(_all_labels(rows[split]))
        known = {label: index for label, index in every.items() if index in trained}
        if trained:
            errors += _unknown_labels(rows[split], known, f"the {first} split has {shown}")
        texts[split] = _with_labels(rows[split], known, numbers)
    are_numbered = bool(labels) and not label_indices(names, labels)
    return LabelledSplits(texts, names, are_numbered)


def _all_labels(rows: Sequence[_Row]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(row.labels for row in rows)))


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


def _indices(names: Sequence[str], labels: Sequence[str]) -> dict[str, int]:
    """Return the index of each label: of its name, or its number.

    Numbers are indices only where no name is another label's number.
    """
    by_name = label_indices(names, labels)
    if _has_others_numbers(names):
        return by_name
    numbers = {str(index): index for index in range(len(names))}
    by_number = {label: numbers[label] for label in labels if label in numbers}
    # Whichever knows more of the labels, so that one that is wrong is listed alone.
    return max(by_name, by_number, key=len)


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
    files: Sequence[Path], columns: Columns = COMMON_COLUMNS
) -> list[tuple[str, str | None]]:
    """Read the texts, or pairs of texts, of classification files; they need no column of labels.

    A text that is empty is "".
    """
    errors: list[str] = []
    texts = gather_rows(files, lambda file: _read_texts(file, columns, errors), "texts", errors)
    raise_listed(errors)
    return texts


def _read_texts(
    file: Path, columns: Columns, errors: list[str]
) -> Iterator[tuple[str, str | None]]:
    for row, names in read_columns(file, columns, errors, needs_label=False):
        cells = [cell_text(row.values[name]) or "" for name in (names.text, names.pair) if name]
        yield _texts(row, names, columns) or (cells[0], cells[1] if names.pair else None)


def _labelled_rows(
    file: Path,
    columns: Columns,
    problem: ProblemType,
    label_names: Sequence[str],
    errors: list[str],
) -> Iterator[_Row | OmittedRow]:
    """Yield each row, or why it is left out; append the errors of rows."""
    # A score may be -1.
    left_out = {"-"} if problem == "regression" else _NO_LABEL - set(label_names)
    for row, names in read_columns(file, columns, errors, needs_label=True):
        try:
            texts = _texts(row, names, columns)
            labels = labels_in(row.values, names.labels, columns, problem)
            classes = _spelled(tuple(row.classes.get(names.labels[0], ())), tuple(label_names))
        except ValueError as error:
            errors.append(f"{row.location}: {error}")
            if isinstance(error, LabelFormatError):
                return  # it is the same in all rows
            continue
        cells = [row.values[name] for name in (names.text, names.pair) if name is not None]
        if texts is None and any(map(is_blank, cells)):
            yield OmittedRow("with an empty text")
        elif texts is None:
            errors.append(f"{row.location}: no text, but {cells[0]!r:.50}")
        elif labels is None and problem == "multi_label_classification":
            errors.append(f"{row.location}: no value in column {' or '.join(names.labels)}")
        elif labels is None:
            yield OmittedRow("without a label")
        elif len(names.labels) == len(labels) == 1 and labels[0] in left_out:
            yield OmittedRow(f"with the label {labels[0]} (--labels names it, if it is one)")
        elif problem == "regression":
            yield _Row(*texts, labels, row.location, ())
        else:
            named = tuple(_class_name(label, classes) for label in labels)
            yield _Row(*texts, named, row.location, classes)


@lru_cache(1)  # all rows of a file have the same
def _spelled(classes: tuple[str, ...], label_names: tuple[str, ...]) -> Sequence[str]:
    """Return a file's names of its numbered labels, in the spelling of `label_names`."""
    if not (classes and label_names):
        return classes
    if all(re.fullmatch(r"LABEL_\d+", name) for name in label_names):
        return ()  # the model's labels have no names
    indices = label_indices(label_names, classes)
    if not set(classes) <= indices.keys():
        raise LabelFormatError(
            f"the file numbers the labels {listed(classes)}, which are not {listed(label_names)}; "
            "write the labels' names into its column, or rename them (--labels)"
        )
    return [label_names[indices[name]] for name in classes]


def _class_name(label: str, classes: Sequence[str]) -> str:
    is_index = label.isdecimal() and int(label) < len(classes)
    return classes[int(label)] if is_index else label


def _texts(row: Row, names: ColumnNames, columns: Columns) -> tuple[str, str | None] | None:
    """Return the text and the pair of a record; None without a text, or a pair that it needs."""
    text, pair = cell_text(row.values[names.text]), None
    if names.pair is not None and (columns.needs_pair or not is_blank(row.values[names.pair])):
        pair = cell_text(row.values[names.pair])
        text = None if pair is None else text
    return None if text is None else (text, pair)


def _natural(label: str) -> tuple[bool, int, str]:
    """Return a sort key: numbers by their value, before other labels."""
    return (not label.isdecimal(), int(label) if label.isdecimal() else 0, label)


def read_task(task: GlueTask, files: Mapping[str, Sequence[Path]]) -> LabelledSplits:
    """Read the files of each split, the training split first, and report skipped rows."""
    return read_splits(
        files, task.labels or None, task.columns, task.problem, task.scale or ANY_SCORE
    )


def read_test(task: GlueTask, folder: Path) -> dict[str, list[LabelledText]]:
    """Read the texts of each split without labels, which have label 0; none if files are missing.

    Rows without a text, of which QQP has a few, are included: GLUE's server requires an answer for
    every row.
    """
    files = {split: find_first(folder, patterns) for split, patterns in task.test.items()}
    if not all(files.values()):
        return {}
    return {
        split: [
            LabelledText(text=text, pair=pair, label=0, place=f"{split} {index}")
            for index, (text, pair) in enumerate(read_texts(paths, task.columns))
        ]
        for split, paths in files.items()
    }


def labelled_examples(
    texts: Sequence[LabelledText], tokenizer: AlbertTokenizer, *, length: int, truncation: bool
) -> tuple[list[TokenisedExample], int]:
    """Tokenise the texts, and return how many were truncated to `length` tokens.

    Of a pair, the longer text is truncated first.
    """
    examples, errors, num_truncated = [], [], 0
    truncator = Truncator(tokenizer, length, "truncate" if truncation else "error")
    for text in progress(texts, title="tokenising texts", unit="texts"):
        try:
            fitted = truncator.fit_texts(text.text, text.pair)
        except TextTooLongError:
            errors.append(f"{text.place}: over {length} tokens; --truncation truncates such texts")
        else:
            num_truncated += fitted.num_truncated > 0
            ids, types = fitted.encoding.ids, fitted.encoding.types
            examples.append(TokenisedExample(ids=ids, types=types, target=text.label))
    raise_listed(errors)
    return examples, num_truncated
