"""Reading of labelled texts and pairs of texts from tables, and their tokenisation."""

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

# Data sets such as SNLI write these values if a text has no label.
_NO_LABEL: Final = frozenset({"-1", "-"})
# If labels are more distinct numbers than this, they are probably scores, not classes.
_MAX_FRACTIONS: Final = 20
_MAX_INTEGERS: Final = 200

# Index of a label, score of a regression, or 1 or 0 for each label if a text can have several.
Label: TypeAlias = int | float | tuple[float, ...]
# The minimum and maximum of a regression's scores.
Scale: TypeAlias = tuple[float, float]
ANY_SCORE: Final[Scale] = (-math.inf, math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledText:
    """A text, or a pair of texts, and its label.

    Attributes:
        location: file and line, for messages.
    """

    text: str
    pair: str | None
    label: Label
    location: str = ""


class LabelledSplits(NamedTuple):
    """The texts of each split, and the names of the labels in order.

    Attributes:
        are_numbered: whether the labels in the first split are indices instead of names.
    """

    texts: Mapping[str, list[LabelledText]]
    names: list[str]
    are_numbered: bool = False


class _Row(NamedTuple):
    """The texts and labels of a row.

    Attributes:
        classes: names of all labels in order, or empty if the file does not define them.
    """

    text: str
    pair: str | None
    labels: tuple[str, ...]
    location: str
    classes: Sequence[str]


def read_splits(
    files: Mapping[str, Sequence[Path]],
    label_names: Sequence[str] | None = None,
    columns: Columns = COMMON_COLUMNS,
    problem: ProblemType | None = "single_label_classification",
    scale: Scale = ANY_SCORE,
) -> LabelledSplits:
    """Read the labelled texts of a data set's splits.

    `read_records` lists the formats. By default, the columns are `text` (or `sentence`,
    `sentence1`), `text_pair` (or `sentence2`) for pairs, and `label` (or `category`), in any case.
    If texts can have several labels, each cell of `label` is a list by default.

    Rows with an empty text or without a label are omitted and counted in one printed line. A row
    has no label if the cell is empty, or if it is -1 or "-" and no label has that name.

    Args:
        files: files of each split, the training split first.
        label_names: names of the labels 0, 1, ... in the order of the model's outputs. The default
            is the names in the file (a ClassLabel of `datasets`), the names of the columns of 0 and
            1, or the sorted labels of the first split (2 before 10), each in its first spelling.
        problem: type of the labels, or None for one label per text that does not look like a score.
        scale: minimum and maximum of a regression's scores.
    """
    problem_type = problem or "single_label_classification"
    _check_columns(columns, label_names, problem_type)
    errors: list[str] = []
    rows = {
        split: gather_rows(
            split_files,
            lambda file: _labelled_rows(file, columns, problem_type, label_names or (), errors),
            "examples",
            errors,
        )
        for split, split_files in files.items()
    }
    if problem is None and not label_names:
        errors += _many_numbers(next(iter(rows.values())))
    if problem == "regression":
        splits = LabelledSplits(_scored(rows, scale, errors), list(label_names or ["score"]))
    else:
        names = label_names or columns.indicators
        splits = _classified(rows, names, errors, problem_type)
    raise_listed(errors)
    return splits


def _many_numbers(rows: Sequence[_Row]) -> list[str]:
    """Return an error if the labels have more distinct numbers than classes are likely to have."""
    labels = _all_labels(rows)
    try:
        numbers = list(map(float, labels))
    except ValueError:
        return []
    limit = _MAX_INTEGERS if all(map(float.is_integer, numbers)) else _MAX_FRACTIONS
    if len(labels) <= limit or any(row.classes for row in rows):
        return []
    message = (
        f"The labels are {len(labels):,} numbers from {min(numbers):g} to {max(numbers):g}. Use "
        "--problem-type regression for values, or --problem-type single_label_classification for "
        "classes."
    )
    return [message]


def _scored(
    rows: Mapping[str, list[_Row]], scale: Scale, errors: list[str]
) -> dict[str, list[LabelledText]]:
    """Return the texts of each split with their scores, and append errors to the list.

    Rows with a score of -1 are omitted if no other score is negative: in STS-B, -1 means missing.
    """
    low, high = scale
    allowed = "a number" if scale == ANY_SCORE else f"a number from {low:g} to {high:g}"
    scores = {row.labels[0] for split_rows in rows.values() for row in split_rows}
    has_gaps = {score for score in scores if score[:1] == "-"} == {"-1"}
    texts: dict[str, list[LabelledText]] = {}
    for split, split_rows in rows.items():
        scored = [row for row in split_rows if not has_gaps or row.labels != ("-1",)]
        if num_omitted := len(split_rows) - len(scored):
            message = print_omitted(num_omitted, len(split_rows), "without a score (-1)")
            errors += [] if scored else [f"There are no examples: {message}"]
        texts[split] = []
        for row in scored:
            (label,) = row.labels
            score = finite_number(label)
            if score is not None and low <= score <= high:
                texts[split].append(_labelled(row, score))
            else:
                errors.append(f"{row.location}: {label!r} is not {allowed}.")
    return texts


def _check_columns(
    columns: Columns, label_names: Sequence[str] | None, problem: ProblemType
) -> None:
    if columns.has_several_labels and problem != "multi_label_classification":
        raise CorpusError(
            f"The problem type is {problem}. --label-separator, and several columns of "
            "--label-column, require multi_label_classification."
        )
    if problem == "regression" and label_names is not None and len(label_names) != 1:
        raise CorpusError(f"A regression has one score, but --labels has {len(label_names)} names.")
    indicators = set(map(label_key, columns.indicators))
    if indicators and label_names and indicators != set(map(label_key, label_names)):
        raise CorpusError(
            f"--label-column {' '.join(columns.indicators)} does not match the labels "
            f"{listed(label_names)}. Specify a column for each label."
        )


def _classified(
    rows: Mapping[str, list[_Row]],
    label_names: Sequence[str] | None,
    errors: list[str],
    problem: ProblemType,
) -> LabelledSplits:
    """Return the texts of each split with their label indices, and append errors to the list."""
    first, *other_splits = rows
    labels = _all_labels(rows[first])
    classes = next((row.classes for row in rows[first] if row.classes), ())
    names = list(label_names or first_spellings(classes or labels))
    if not (label_names or classes):
        names.sort(key=_natural)
    find_indices = partial(_indices if label_names else label_indices, names)
    by_label = find_indices(labels)
    errors += _unknown_labels(rows[first], by_label, f"The labels are {listed(names)}.")
    trained_indices = set(by_label.values())
    trained_names = listed([names[index] for index in sorted(trained_indices)])
    num_labels = None if problem == "single_label_classification" else len(names)
    texts = {first: _with_labels(rows[first], by_label, num_labels)}
    for split in other_splits:
        # A split may have indices even if the first split has names.
        indices = find_indices(_all_labels(rows[split]))
        trained_labels = {
            label: index for label, index in indices.items() if index in trained_indices
        }
        if trained_indices:
            message = f"The labels of the {first} split are {trained_names}."
            errors += _unknown_labels(rows[split], trained_labels, message)
        texts[split] = _with_labels(rows[split], trained_labels, num_labels)
    are_numbered = bool(labels) and not label_indices(names, labels)
    return LabelledSplits(texts, names, are_numbered)


def _all_labels(rows: Sequence[_Row]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(row.labels for row in rows)))


def _with_labels(
    rows: Sequence[_Row], by_label: Mapping[str, int], num_labels: int | None
) -> list[LabelledText]:
    """Return the texts whose labels all have an index.

    Args:
        num_labels: number of labels if a text can have several, or None for one label per text.
    """
    texts = []
    for row in rows:
        if not by_label.keys() >= set(row.labels):
            continue
        label_set = {by_label[label] for label in row.labels}
        label: Label = (
            by_label[row.labels[0]]
            if num_labels is None
            else tuple(float(index in label_set) for index in range(num_labels))
        )
        texts.append(_labelled(row, label))
    return texts


def _indices(names: Sequence[str], labels: Sequence[str]) -> dict[str, int]:
    """Return the index of each label, which can be a name or an index.

    Numbers are names, not indices, if a name is the index of another label.
    """
    by_name = label_indices(names, labels)
    if _has_shifted_numbers(names):
        return by_name
    numbers = {str(index): index for index in range(len(names))}
    by_number = {label: numbers[label] for label in labels if label in numbers}
    # The larger result is used, so that errors list the fewest labels.
    return max(by_name, by_number, key=len)


def _has_shifted_numbers(names: Sequence[str]) -> bool:
    """Return whether a name is the index of another label, as with the labels 1 to 5."""
    numbers = list(map(str, range(len(names))))
    return any(name in numbers and numbers[index] != name for index, name in enumerate(names))


def _unknown_labels(rows: Sequence[_Row], by_label: Mapping[str, int], allowed: str) -> list[str]:
    """Return an error for each label without an index, with the location of its first row."""
    unknown: dict[str, list[str]] = {}
    for row in rows:
        for label in row.labels:
            if label not in by_label:
                unknown.setdefault(label, []).append(row.location)
    return [
        f"{locations[0]}: Label {label!r} ({len(locations):,} rows) is not allowed. {allowed}"
        for label, locations in unknown.items()
    ]


def _labelled(row: _Row, label: Label) -> LabelledText:
    return LabelledText(text=row.text, pair=row.pair, label=label, location=row.location)


def read_texts(
    files: Sequence[Path], columns: Columns = COMMON_COLUMNS
) -> list[tuple[str, str | None]]:
    """Read the texts or pairs of texts of classification files, with or without a label column.

    Empty texts are included.
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
    """Yield each row, or the reason for omitting it, and append errors to the list."""
    # A score may be -1.
    missing = {"-"} if problem == "regression" else _NO_LABEL - set(label_names)
    for row, names in read_columns(file, columns, errors, needs_label=True):
        try:
            texts = _texts(row, names, columns)
            labels = labels_in(row.values, names.labels, columns, problem)
            classes = _spelled(tuple(row.classes.get(names.labels[0], ())), tuple(label_names))
        except ValueError as error:
            errors.append(f"{row.location}: {error}")
            if isinstance(error, LabelFormatError):
                return  # all rows have this error
            continue
        cells = [row.values[name] for name in (names.text, names.pair) if name is not None]
        if texts is None and any(map(is_blank, cells)):
            yield OmittedRow("with an empty text")
        elif texts is None:
            errors.append(f"{row.location}: {cells[0]!r:.50} is not a text.")
        elif labels is None and problem == "multi_label_classification":
            errors.append(f"{row.location}: Column {' or '.join(names.labels)} has no value.")
        elif labels is None:
            yield OmittedRow("without a label")
        elif len(names.labels) == len(labels) == 1 and labels[0] in missing:
            yield OmittedRow(f"with the label {labels[0]} (if this is a label, add it to --labels)")
        elif problem == "regression":
            yield _Row(*texts, labels, row.location, ())
        else:
            row_labels = tuple(_class_name(label, classes) for label in labels)
            yield _Row(*texts, row_labels, row.location, classes)


@lru_cache(1)  # all rows of a file have the same classes
def _spelled(classes: tuple[str, ...], label_names: tuple[str, ...]) -> Sequence[str]:
    """Return a file's label names, in the spelling of `label_names`."""
    if not (classes and label_names):
        return classes
    if all(re.fullmatch(r"LABEL_\d+", name) for name in label_names):
        return ()  # `transformers` generates these names
    indices = label_indices(label_names, classes)
    if not set(classes) <= indices.keys():
        raise LabelFormatError(
            f"The file's labels are {listed(classes)}, not {listed(label_names)}. Write the "
            "labels' names into the column, or rename them (--labels)."
        )
    return [label_names[indices[name]] for name in classes]


def _class_name(label: str, classes: Sequence[str]) -> str:
    is_index = label.isdecimal() and int(label) < len(classes)
    return classes[int(label)] if is_index else label


def _texts(row: Row, names: ColumnNames, columns: Columns) -> tuple[str, str | None] | None:
    """Return the text and the pair of a row, or None if the text or a required pair is missing."""
    text, pair = cell_text(row.values[names.text]), None
    if names.pair is not None and (columns.needs_pair or not is_blank(row.values[names.pair])):
        pair = cell_text(row.values[names.pair])
        text = None if pair is None else text
    return None if text is None else (text, pair)


def _natural(label: str) -> tuple[bool, int, str]:
    """Return a sort key that orders numbers by their values, and puts them before words."""
    return (not label.isdecimal(), int(label) if label.isdecimal() else 0, label)


def read_task(task: GlueTask, files: Mapping[str, Sequence[Path]]) -> LabelledSplits:
    """Read the files of each split, the training split first, and report skipped rows."""
    return read_splits(
        files, task.labels or None, task.columns, task.problem, task.scale or ANY_SCORE
    )


def read_test(task: GlueTask, folder: Path) -> dict[str, list[LabelledText]]:
    """Read GLUE's test splits, with 0 as each label. If files are missing, return no splits.

    Rows without a text are included, because GLUE's server requires an answer for every row.
    """
    files = {split: find_first(folder, patterns) for split, patterns in task.test.items()}
    if not all(files.values()):
        return {}
    return {
        split: [
            LabelledText(text=text, pair=pair, label=0, location=f"{split} {index}")
            for index, (text, pair) in enumerate(read_texts(paths, task.columns))
        ]
        for split, paths in files.items()
    }


def labelled_examples(
    texts: Sequence[LabelledText], tokenizer: AlbertTokenizer, *, length: int, truncation: bool
) -> tuple[list[TokenisedExample], int]:
    """Return the tokenised texts, and the number of texts that were truncated to `length` tokens.

    The longer text of a pair is truncated first.
    """
    examples, errors, num_truncated = [], [], 0
    truncator = Truncator(tokenizer, length, "truncate" if truncation else "error")
    for text in progress(texts, title="tokenising texts", unit="texts"):
        try:
            fitted = truncator.fit_texts(text.text, text.pair)
        except TextTooLongError:
            errors.append(
                f"{text.location}: The text has more than {length} tokens. Use --truncation."
            )
        else:
            num_truncated += fitted.num_truncated > 0
            ids, types = fitted.encoding.ids, fitted.encoding.types
            examples.append(TokenisedExample(ids=ids, types=types, target=text.label))
    raise_listed(errors)
    return examples, num_truncated
