"""Labelled data from files: classification as TSV, CSV or JSONL, questions as SQuAD JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from training.data.corpus import CorpusError, read_lines

_TEXT_COLUMNS: Final = ("text", "sentence", "sentence1", "sentence_A")
_PAIR_COLUMNS: Final = ("text_pair", "sentence2", "sentence_B")
_LABEL_COLUMNS: Final = ("label", "category", "entailment_judgment")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledText:
    """A text, or a pair of texts, and the index of its label."""

    text: str
    pair: str | None
    label: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question on a context.

    Attributes:
        answers: the correct answers; empty if the context has none.
        start: character offset of the first answer in the context; None without an answer.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    start: int | None


def read_labelled(
    files: Sequence[Path], label_names: Sequence[str] | None = None
) -> tuple[list[LabelledText], list[str]]:
    """Read the examples of classification files, and the names of the labels in order.

    The suffix gives the format: `.tsv`, `.csv` or `.jsonl`, optionally with `.gz`, `.xz`, `.zst`.
    Columns are `text` (or `sentence`, `sentence1`), for pairs `text_pair` (or `sentence2`), and
    `label` (or `category`).

    Args:
        files: read one after the other.
        label_names: names of the labels 0, 1, ... of the files; or the labels themselves, in the
            order of the model's outputs. By default the labels of the files, sorted (2 before 10).

    Raises:
        CorpusError: a file cannot be read, has no such columns, or a label is not among the names.
    """
    rows = [row for file in files for row in _read_rows(file)]
    if not rows:
        raise CorpusError(f"no examples in {', '.join(map(str, files))}")
    labels = sorted({label for _, _, label, _ in rows}, key=_natural)
    names = list(label_names or labels)
    by_label = {name: index for index, name in enumerate(names)}
    if not set(labels) <= set(names):  # the files number the labels
        by_label = {str(index): index for index in range(len(names))}
    examples = []
    for text, pair, label, place in rows:
        if label not in by_label:
            raise CorpusError(f"{place}: label {label!r}; allowed are {', '.join(names)}")
        examples.append(LabelledText(text=text, pair=pair, label=by_label[label]))
    return examples, names


def read_texts(files: Sequence[Path]) -> list[tuple[str, str | None]]:
    """Read the texts, or pairs of texts, of classification files, without their labels.

    Files are as for `read_labelled`, but need no column of labels; or `.txt`, one text per line.

    Raises:
        CorpusError: a file cannot be read or has no column of texts, or there is no text.
    """
    texts = [text for file in files for text in _read_texts(file)]
    if not texts:
        raise CorpusError(f"no texts in {', '.join(map(str, files))}")
    return texts


def _read_texts(file: Path) -> Iterator[tuple[str, str | None]]:
    if ".txt" in file.suffixes:
        yield from ((line.strip(), None) for line in read_lines(file) if line.strip())
        return
    for row, place in _placed_records(file):
        yield _texts_of(row, place)


def read_squad(files: Sequence[Path]) -> list[Question]:
    """Read the questions of SQuAD files, v1.1 or v2.0 (JSON, optionally compressed).

    Raises:
        CorpusError: a file cannot be read or is not in that format.
    """
    questions: list[Question] = []
    for file in files:
        try:
            questions += list(_questions(json.loads("".join(read_lines(file)))))
        except json.JSONDecodeError as error:
            raise CorpusError(f"{file} is not JSON: {error}; is it complete?") from error
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise CorpusError(f"{file} is not in SQuAD's format: {error!r}") from error
    if not questions:
        raise CorpusError(f"no questions in {', '.join(map(str, files))}")
    return questions


def _questions(content: dict[str, Any]) -> Iterator[Question]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for record in paragraph["qas"]:
                answers = record["answers"]
                yield Question(
                    id=record["id"],
                    question=record["question"].strip(),
                    context=paragraph["context"],
                    answers=tuple(answer["text"] for answer in answers),
                    start=answers[0]["answer_start"] if answers else None,
                )


def _read_rows(file: Path) -> Iterator[tuple[str, str | None, str, str]]:
    """Yield text, pair, label and location of each row."""
    for row, place in _placed_records(file):
        text, pair = _texts_of(row, place)
        yield text, pair, _column(row, _LABEL_COLUMNS, place), place


def _texts_of(row: dict[str, Any], place: str) -> tuple[str, str | None]:
    text = _column(row, _TEXT_COLUMNS, place)
    has_pair = any(row.get(name) not in (None, "") for name in _PAIR_COLUMNS)
    return text, _column(row, _PAIR_COLUMNS, place) if has_pair else None


def _placed_records(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each row of a file and its location, for error messages."""
    try:
        for number, row in enumerate(_records(file, read_lines(file)), start=1):
            yield row, f"{file}, row {number}"
    except (json.JSONDecodeError, csv.Error) as error:
        raise CorpusError(f"{file}: {error}") from error


def _records(file: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    if ".jsonl" in file.suffixes:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise CorpusError(f"{file}, line {number}: no JSON object")
                yield record
    elif ".tsv" in file.suffixes:  # as in GLUE, quotes are ordinary characters
        yield from csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    elif ".csv" in file.suffixes:
        yield from csv.DictReader(lines)
    else:
        raise CorpusError(f"{file}: the kind is not known; name it .tsv, .csv or .jsonl")


def _natural(label: str) -> tuple[bool, int, str]:
    """Return a sort key: numbers by their value, before other labels."""
    return (not label.isdecimal(), int(label) if label.isdecimal() else 0, label)


def _column(row: dict[str, Any], names: Sequence[str], place: str) -> str:
    for name in names:
        value = row.get(name)
        if isinstance(value, str | int) and str(value).strip():
            return str(value).strip()
    raise CorpusError(f"{place}: no value in a column {' or '.join(names)}")
