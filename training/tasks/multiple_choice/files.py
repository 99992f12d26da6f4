"""Reading of multiple-choice questions from tables and RACE's files, and their tokenisation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from albert_serve.progress import progress
from albert_serve.tables import Row
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import TokenisedExample
from training.data.corpus import CorpusError, find_files, read_lines
from training.data.labelled.cells import cell_text
from training.data.labelled.columns import (
    COMMON_COLUMNS,
    ColumnNames,
    Columns,
    read_choice_columns,
)
from training.data.labelled.rows import collecting, gather_rows, raise_listed

# Name of the only split if files are not divided into splits.
_ONLY_SPLIT: Final = "data"
# Keys of a RACE record, in addition to `article`.
_RACE_FIELDS: Final = ("questions", "options", "answers")
_NUM_SPECIAL: Final = 3
# Blanks may be within words: RACE has "a_." and "to_tomorrow", and the original code replaces every
# underscore.
_BLANK: Final = re.compile("_+")
# Truncation leaves at least this number of tokens of a choice with its question.
_MIN_CHOICE_TOKENS: Final = 128
_Tokens: TypeAlias = "NDArray[np.int32]"
# Names of RACE's folders say whether questions are from middle schools or from high schools.
_RACE_LEVELS: Final = re.compile(r"(?<![a-z])(middle|high)(?![a-z])")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceText:
    """A context, the choices that answer a question or continue the context, and the right choice.

    Attributes:
        question: text before each choice, or with a blank for it, or None without a question.
        label: index of the right choice.
        group: group of questions that has its own metrics, or "" for no group.
        location: file and line, for messages.
    """

    context: str
    question: str | None
    choices: tuple[str, ...]
    label: int
    group: str = ""
    location: str = ""


def read_choices(
    files: Sequence[Path], columns: Columns = COMMON_COLUMNS, choices: Sequence[str] = ()
) -> list[ChoiceText]:
    """Read the questions of files, or of all files in folders.

    Tables are `.csv`, `.tsv`, `.jsonl` or `.parquet` files. Files of RACE are `.txt` files with a
    JSON object of `article`, `questions`, `options` and `answers`, or `.jsonl` files with such an
    object in each line.

    Args:
        columns: columns of the context (`text`), the question (`pair`) and the answer (`label`).
        choices: columns of the choices, or empty for the common names.
    """
    return read_choice_splits({_ONLY_SPLIT: files}, columns, choices)[_ONLY_SPLIT]


def read_choice_splits(
    files: Mapping[str, Sequence[Path]],
    columns: Columns = COMMON_COLUMNS,
    choices: Sequence[str] = (),
) -> dict[str, list[ChoiceText]]:
    """Read the questions of each split, and raise one error for all faults."""
    errors: list[str] = []
    questions = {
        split: gather_rows(
            [file for path in paths for file in (find_files([path]) if path.is_dir() else [path])],
            lambda file: _read_file(file, columns, choices, errors),
            "questions",
            errors,
        )
        for split, paths in files.items()
    }
    raise_listed(errors)
    return questions


def _read_file(
    file: Path, columns: Columns, choices: Sequence[str], errors: list[str]
) -> Iterator[ChoiceText]:
    if ".txt" in file.suffixes:
        yield from _read_passage_file(file, errors)
        return
    for row, names in read_choice_columns(file, columns, choices, errors):
        if names is None:
            yield from _race_questions(row.values, row.location, _level(file), errors)
        else:
            with collecting(errors):
                yield _question(row, names)


def _read_passage_file(file: Path, errors: list[str]) -> Iterator[ChoiceText]:
    """Yield the questions of a RACE file, which has one passage."""
    try:
        passage = json.loads("".join(read_lines(file)))
    except (CorpusError, OSError) as error:
        errors.append(str(error))
    except (ValueError, RecursionError) as error:
        errors.append(f"{file} is not JSON, which a .txt file of RACE must be: {error}")
    else:
        if isinstance(passage, dict) and "article" in passage:
            yield from _race_questions(passage, str(file), _level(file), errors)
        else:
            errors.append(f"{file} has no article, which a passage of RACE must have.")


def _level(file: Path) -> str:
    """Return the group of a RACE file, from the name of the file or its folder."""
    for name in (file.name, file.parent.name):
        if match := _RACE_LEVELS.search(name):
            return match[1]
    return ""


def _race_questions(
    passage: Mapping[str, Any], location: str, group: str, errors: list[str]
) -> Iterator[ChoiceText]:
    fields = [passage.get(name) for name in _RACE_FIELDS]
    context = cell_text(passage["article"])
    if context is None:
        errors.append(f"{location}: The passage has no article.")
    elif not all(isinstance(field, list) for field in fields):
        errors.append(f"{location}: {', '.join(_RACE_FIELDS)} must be lists.")
    elif len({len(field) for field in fields if field is not None}) != 1:
        counts = ", ".join(
            f"{len(field or ())} {name}" for field, name in zip(fields, _RACE_FIELDS, strict=True)
        )
        errors.append(f"{location}: The numbers of {', '.join(_RACE_FIELDS)} differ: {counts}.")
    else:
        lists = [field or [] for field in fields]
        for number, (question, options, answer) in enumerate(zip(*lists, strict=True), start=1):
            # Blanks get spaces around them, as most blanks in RACE have.
            text = re.sub(r"\s*_+\s*", " _ ", cell_text(question) or "").strip()
            with collecting(errors):
                yield _checked(
                    context=context,
                    question=text or None,
                    choices=options if isinstance(options, list) else [],
                    answer=answer,
                    group=group,
                    location=f"{location}, question {number}",
                )


def _question(row: Row, names: ColumnNames) -> ChoiceText:
    context = cell_text(row.values[names.text])
    if context is None:
        raise CorpusError(f"{row.location}: Column {names.text} has no text.")
    cells = [row.values[name] for name in names.choices]
    if None in cells:
        column = names.choices[cells.index(None)]
        raise CorpusError(f"{row.location}: The row ends before column {column}.")
    choices: Any = cells[0] if len(cells) == 1 else _without_empty_end(cells)
    labels: Sequence[Any] = ()
    if isinstance(choices, Mapping):  # in ARC's format: {"text": [...], "label": ["A", ...]}
        choices, labels = choices.get("text"), choices.get("label") or ()
    return _checked(
        context=context,
        question=None if names.pair is None else cell_text(row.values[names.pair]),
        choices=choices if isinstance(choices, Sequence) and not isinstance(choices, str) else [],
        answer=row.values[names.labels[0]],
        labels=labels,
        location=row.location,
    )


def _without_empty_end(cells: Sequence[Any]) -> list[Any]:
    """Return the cells without empty cells at the end, because questions may have fewer choices."""
    last = max((number for number, cell in enumerate(cells) if cell_text(cell)), default=-1)
    return list(cells[: last + 1])


def _checked(
    *,
    context: str,
    question: str | None,
    choices: Sequence[Any],
    answer: Any,
    location: str,
    labels: Sequence[Any] = (),
    group: str = "",
) -> ChoiceText:
    """Return a question, after a check of its choices and answer."""
    texts = [cell_text(choice) for choice in choices]
    present = tuple(text for text in texts if text is not None)
    if len(texts) < 2:
        found = "one choice" if texts else "no choices"
        raise CorpusError(f"{location}: The question has {found}. It needs two or more.")
    if len(present) < len(texts):
        raise CorpusError(f"{location}: Choice {texts.index(None)} has no text (counted from 0).")
    names = [str(label) for label in labels]
    if _is_ambiguous(answer, present, names):
        raise CorpusError(
            f"{location}: Answer {answer!r} is the index of one choice and the text of another "
            "choice."
        )
    label = _find_answer(answer, present, names)
    if label is None:
        last = ascii_uppercase[min(len(present), len(ascii_uppercase)) - 1]
        raise CorpusError(
            f"{location}: Answer {answer!r} is not one of the {len(present)} choices. Use an "
            f"index, 0 to {len(present) - 1}, a letter, A to {last}, or the text of a choice."
        )
    return ChoiceText(
        context=context,
        question=question,
        choices=present,
        label=label,
        group=group,
        location=location,
    )


def _find_answer(answer: Any, choices: Sequence[str], labels: Sequence[str]) -> int | None:
    """Return the index of an answer, which is one of the labels, an index, a letter or a text."""
    text = cell_text(answer)
    if text is None:
        return None
    if text in labels:
        index = labels.index(text)
    elif text.isdecimal():
        index = int(text)
    elif len(text) == 1 and text in ascii_uppercase:
        index = ascii_uppercase.index(text)
    else:
        index = choices.index(text) if choices.count(text) == 1 else len(choices)
    return index if index < len(choices) else None


def _is_ambiguous(answer: Any, choices: Sequence[str], labels: Sequence[str]) -> bool:
    """Return whether an answer is the index of a choice, and the text of another choice."""
    if not isinstance(answer, str):
        return False
    text = cell_text(answer) or ""
    if text in labels or not text.isdecimal() or int(text) >= len(choices):
        return False
    return text in choices and choices.index(text) != int(text)


def groups_of(questions: Iterable[ChoiceText]) -> list[str]:
    """Return the names of the groups of questions, in the order of their first questions."""
    return [name for name in dict.fromkeys(question.group for question in questions) if name]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceExample:
    """The tokens of a question with its choices. Questions on the same context share its tokens.

    Attributes:
        context: token ids of the context, without special tokens.
        choices: token ids of each choice with its question, without special tokens.
        target: index of the right choice.
        length: maximum number of tokens in a sequence.
    """

    context: _Tokens
    choices: tuple[_Tokens, ...]
    target: int
    length: int

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each sequence."""
        return [sum(self._split(choice)) + _NUM_SPECIAL for choice in self.choices]

    @property
    def is_truncated(self) -> bool:
        """Whether a sequence lacks tokens of the context or the choice."""
        longest = max(map(len, self.choices))
        return len(self.context) + longest + _NUM_SPECIAL > self.length

    def sequences(self, tokenizer: AlbertTokenizer) -> list[TokenisedExample]:
        """Return [CLS] context [SEP] question choice [SEP] for each choice, truncated."""
        cls_id, sep_id = tokenizer.cls_id, tokenizer.sep_id
        sequences = []
        for choice in self.choices:
            num_first, num_second = self._split(choice)
            second = choice[len(choice) - num_second :].tolist()
            sequences.append(
                TokenisedExample(
                    ids=[cls_id, *self.context[:num_first].tolist(), sep_id, *second, sep_id],
                    types=[0] * (num_first + 2) + [1] * (num_second + 1),
                    target=0,  # the question has the target
                )
            )
        return sequences

    def _split(self, choice: _Tokens) -> tuple[int, int]:
        return split_choice(len(self.context), len(choice), self.length)


def with_choice(question: str | None, choice: str) -> str:
    """Fill a question's blanks with a choice, or append the choice if there are no blanks."""
    if not question:
        return choice
    if _BLANK.search(question):
        return _BLANK.sub(lambda _: choice, question)
    return f"{question} {choice}"


def split_choice(num_context: int, num_choice: int, max_positions: int) -> tuple[int, int]:
    """Return how many tokens of a context and of a choice fit into the model's positions.

    The context is truncated first, at its end. A choice with its question is truncated at its
    beginning, but keeps 128 tokens, or half of the positions if that is less (as in run_race of the
    original code).
    """
    room = max_positions - _NUM_SPECIAL
    reserved = min(_MIN_CHOICE_TOKENS, room // 2)
    num_choice = min(num_choice, max(reserved, room - num_context))
    return min(num_context, room - num_choice), num_choice


def choice_examples(
    texts: Sequence[ChoiceText], tokenizer: AlbertTokenizer, *, length: int, truncation: bool
) -> tuple[list[ChoiceExample], int]:
    """Return the tokenised questions, and the number of questions with a truncated text."""
    examples, errors, num_truncated = [], [], 0
    context: tuple[str, _Tokens] | None = None
    for text in progress(texts, title="tokenising questions", unit="questions"):
        # Questions on the same passage follow each other, so the passage is tokenised once.
        if context is None or context[0] != text.context:
            context = text.context, _tokens(tokenizer, text.context)
        example = ChoiceExample(
            context=context[1],
            choices=tuple(
                _tokens(tokenizer, with_choice(text.question, choice)) for choice in text.choices
            ),
            target=text.label,
            length=length,
        )
        if example.is_truncated and not truncation:
            errors.append(
                f"{text.location}: The text has more than {length} tokens. Use --truncation."
            )
        num_truncated += example.is_truncated
        examples.append(example)
    raise_listed(errors)
    return examples, num_truncated


def _tokens(tokenizer: AlbertTokenizer, text: str) -> _Tokens:
    return np.array(tokenizer.encode_plain(text).ids, np.int32)
