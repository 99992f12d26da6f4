"""Labelled texts, and pairs of texts, from CSV, TSV, JSONL and Parquet files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from training.data.corpus import CorpusError, read_lines

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
_DELIMITERS: Final = ",;\t|"
_LISTED_ERRORS: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledText:
    """A text, or a pair of texts, and the index of its label.

    Attributes:
        place: file and row, for messages.
    """

    text: str
    pair: str | None
    label: int
    place: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns to read, by name; None for those that data sets commonly have.

    Attributes:
        delimiter: of CSV and TSV files; None to detect it.
    """

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    delimiter: str | None = None


class _Row(NamedTuple):
    text: str
    pair: str | None
    label: str
    place: str


def read_labelled(
    files: Sequence[Path],
    label_names: Sequence[str] | None = None,
    columns: Columns = Columns(),
) -> tuple[list[LabelledText], list[str]]:
    """Read the examples of classification files, and the names of the labels in order.

    The suffix gives the format: `.tsv`, `.csv` or `.jsonl`, optionally with `.gz`, `.xz`, `.zst`;
    or `.parquet`. Columns are `text` (or `sentence`, `sentence1`), for pairs `text_pair` (or
    `sentence2`), and `label` (or `category`), or those that `columns` names.

    Args:
        files: read one after the other.
        label_names: names of the labels 0, 1, ... of the files; or the labels themselves, in the
            order of the model's outputs. By default the labels of the files, sorted (2 before 10).

    Raises:
        CorpusError: files cannot be read, lack columns, or have labels that are not among the
            names; the message lists all such rows, up to a limit.
    """
    rows: list[_Row] = []
    errors: list[str] = []
    for row in chain.from_iterable(_read_rows(file, columns) for file in files):
        if isinstance(row, str):
            errors.append(row)
        else:
            rows.append(row)
    if not rows and not errors:
        raise CorpusError(f"no examples in {', '.join(map(str, files))}")
    labels = sorted({row.label for row in rows}, key=_natural)
    names = list(label_names or labels)
    by_name = {name: index for index, name in enumerate(names)}
    by_number = {str(index): index for index in range(len(names))}
    # Whichever knows more of the labels, so that one that is wrong is listed alone.
    by_label = max(by_name, by_number, key=lambda known: len(known.keys() & set(labels)))
    unknown: dict[str, list[str]] = {}
    for row in rows:
        if row.label not in by_label:
            unknown.setdefault(row.label, []).append(row.place)
    errors += [
        f"{places[0]}: label {label!r} ({len(places):,} rows); allowed are {', '.join(names)}"
        for label, places in unknown.items()
    ]
    raise_listed(errors)
    return [
        LabelledText(text=row.text, pair=row.pair, label=by_label[row.label], place=row.place)
        for row in rows
    ], names


def read_texts(
    files: Sequence[Path],
    columns: Columns = Columns(),
) -> list[tuple[str, str | None]]:
    """Read the texts, or pairs of texts, of classification files, without their labels.

    Files are as for `read_labelled`, but need no column of labels; or `.txt`, one text per line.

    Raises:
        CorpusError: a file cannot be read or has no column of texts, or there is no text.
    """
    texts = [text for file in files for text in _read_texts(file, columns)]
    if not texts:
        raise CorpusError(f"no texts in {', '.join(map(str, files))}")
    return texts


def raise_listed(errors: Sequence[str]) -> None:
    """Raise the errors as one, the first ones listed line by line.

    Raises:
        CorpusError: there are errors.
    """
    if not errors:
        return
    listed = list(errors[:_LISTED_ERRORS])
    if len(errors) > len(listed):
        listed.append(f"and {len(errors) - len(listed):,} more rows")
    raise CorpusError("\n".join(listed))


def _read_texts(file: Path, columns: Columns) -> Iterator[tuple[str, str | None]]:
    if ".txt" in file.suffixes:
        yield from ((line.strip(), None) for line in read_lines(file) if line.strip())
        return
    errors = []
    for texts, _, place in _texts_of(file, columns):
        if texts is None:
            errors.append(f"{place}: no text")
        else:
            yield texts
    raise_listed(errors)


def _read_rows(file: Path, columns: Columns) -> Iterator[_Row | str]:
    """Yield each row, or the error of a row."""
    for texts, record, place in _texts_of(file, columns):
        name = _label_column(file, record, columns)
        label = _text(record[name])
        if texts is None or label is None:
            yield f"{place}: no {'text' if texts is None else f'value in column {name}'}"
        else:
            yield _Row(*texts, label, place)


def _texts_of(
    file: Path, columns: Columns
) -> Iterator[tuple[tuple[str, str | None] | None, dict[str, Any], str]]:
    """Yield the text and the pair of each row, None without a text; its record, and its place."""
    # Rows of JSONL may have different keys.
    names_of: dict[tuple[str, ...], tuple[str, str | None]] = {}
    for number, record in enumerate(_records(file, columns), start=1):
        keys = tuple(record)
        if keys not in names_of:
            names_of[keys] = _text_columns(file, record, columns)
        name, pair_name = names_of[keys]
        text, pair = _text(record[name]), None
        if pair_name is not None and record[pair_name] not in (None, ""):
            pair = _text(record[pair_name])
            text = None if pair is None else text
        yield None if text is None else (text, pair), record, f"{file}, row {number}"


def _text_columns(file: Path, record: dict[str, Any], columns: Columns) -> tuple[str, str | None]:
    """Return the columns of the text and, in a file of pairs, of the second text."""
    for option, name in (("text", columns.text), ("pair", columns.pair)):
        if name is not None and name not in record:
            raise CorpusError(f"{file}: no column {name} for --{option}-column; {_found(record)}")
    if columns.text is not None:
        return columns.text, columns.pair
    for first, second in _PAIRS:
        pair = columns.pair or second
        if first in record and pair in record and first != pair:
            return first, pair
    for name in _TEXTS:
        if name in record and name != columns.pair:
            return name, columns.pair
    raise CorpusError(
        f"{file}: no column {' or '.join(_TEXTS)}; {_found(record)}; give --text-column"
    )


def _label_column(file: Path, record: dict[str, Any], columns: Columns) -> str:
    for name in (columns.label,) if columns.label is not None else _LABELS:
        if name in record:
            return name
    if columns.label is not None:
        raise CorpusError(f"{file}: no column {columns.label} for --label-column; {_found(record)}")
    raise CorpusError(
        f"{file}: no column {' or '.join(_LABELS[:3])}; {_found(record)}; give --label-column"
    )


def _found(record: dict[str, Any]) -> str:
    return "its columns are " + ", ".join(str(name) for name in record)


def _records(file: Path, columns: Columns) -> Iterator[dict[str, Any]]:
    suffixes = set(file.suffixes)
    try:
        if ".parquet" in suffixes:
            yield from _parquet_records(file)
        elif ".jsonl" in suffixes:
            yield from _json_records(file, read_lines(file))
        elif suffixes & {".tsv", ".csv"}:
            yield from _table_records(file, columns)
        else:
            raise CorpusError(
                f"{file}: the format is unknown; name it .csv, .tsv, .jsonl or .parquet"
            )
    except csv.Error as error:
        raise CorpusError(f"{file}: {error}") from error


def _json_records(file: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise CorpusError(f"{file}, line {number}: {error}") from error
            if not isinstance(record, dict):
                raise CorpusError(f"{file}, line {number}: no JSON object")
            yield record


def _table_records(file: Path, columns: Columns) -> Iterator[dict[str, Any]]:
    lines = iter(read_lines(file))
    header = next(lines, "")
    is_tsv = ".tsv" in file.suffixes
    delimiter = columns.delimiter or ("\t" if is_tsv else _detect_delimiter(header))
    # As in GLUE, quotes are ordinary characters of a TSV file.
    reader = csv.DictReader(
        chain([header], lines),
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL,
    )
    for number, record in enumerate(reader, start=1):
        if None in record:
            raise CorpusError(
                f"{file}, row {number}: more fields than the header's {len(record) - 1} "
                f"(delimiter {delimiter!r}; --delimiter gives another)"
            )
        yield record


def _detect_delimiter(header: str) -> str:
    """Return the delimiter that divides the header into the most columns."""
    return max(
        _DELIMITERS, key=lambda delimiter: len(next(csv.reader([header], delimiter=delimiter), []))
    )


def _parquet_records(file: Path) -> Iterator[dict[str, Any]]:
    try:
        for batch in pq.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"{file} cannot be read: {error}") from error


def _text(value: object) -> str | None:
    """Return a cell as text without surrounding spaces; None if it is empty."""
    if not isinstance(value, str | int | float):
        return None
    if isinstance(value, float) and value.is_integer():  # pandas' integers of a column with gaps
        value = int(value)
    return str(value).strip() or None


def _natural(label: str) -> tuple[bool, int, str]:
    """Return a sort key: numbers by their value, before other labels."""
    return (not label.isdecimal(), int(label) if label.isdecimal() else 0, label)
