"""Questions of multiple choice, from tables and from the files of RACE, and their tokens."""

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

# A file has one split, of this name.
_ONLY: Final = "data"
# A record of RACE has these keys, and `article`.
_RACE_FIELDS: Final = ("questions", "options", "answers")
_NUM_SPECIAL: Final = 3
# Also within words: RACE has "a_." and "to_tomorrow", and the original replaces every underscore.
_BLANK: Final = re.compile("_+")
# Tokens of a choice with its question that are kept in any case.
_CHOICE_TOKENS: Final = 128
_Tokens: TypeAlias = "NDArray[np.int32]"
# The two kinds of schools whose examinations RACE consists of, as its folders name them.
_RACE_LEVELS: Final = re.compile(r"(?<![a-z])(middle|high)(?![a-z])")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceText:
    """A text, the choices that answer a question on it or go on after it, and the right one.

    Attributes:
        question: precedes each choice, or has a blank for it; None without one.
        label: index of the right choice.
        group: of questions that are measured by themselves; "" for none.
        place: file and line, for messages.
    """

    context: str
    question: str | None
    choices: tuple[str, ...]
    label: int
    group: str = ""
    place: str = ""


def read_choices(
    files: Sequence[Path], columns: Columns = COMMON_COLUMNS, choices: Sequence[str] = ()
) -> list[ChoiceText]:
    """Read the questions of files, or of all files in folders.

    A file is `.csv`, `.tsv`, `.jsonl` or `.parquet`, as for `read_splits`, with the columns that
    `choice_columns` describes; or one of RACE: a `.txt` file that is one JSON object, or `.jsonl`
    with one a line, of `article`, `questions`, `options` and `answers`.

    Args:
        columns: of the context (`text`), the question (`pair`) and the answer (`label`).
        choices: the columns of the choices; none for those that data sets commonly have.
    """
    return read_choice_splits({_ONLY: files}, columns, choices)[_ONLY]


def read_choice_splits(
    files: Mapping[str, Sequence[Path]],
    columns: Columns = COMMON_COLUMNS,
    choices: Sequence[str] = (),
) -> dict[str, list[ChoiceText]]:
    """Read the questions of each split, as `read_choices`; errors of all splits are listed."""
    errors: list[str] = []
    questions = {
        split: gather_rows(
            [file for path in its for file in (find_files([path]) if path.is_dir() else [path])],
            lambda file: _read_file(file, columns, choices, errors),
            "questions",
            errors,
        )
        for split, its in files.items()
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
    """Yield the questions of one of RACE's own files, of one passage."""
    try:
        passage = json.loads("".join(read_lines(file)))
    except (CorpusError, OSError) as error:
        errors.append(str(error))
    except (ValueError, RecursionError) as error:
        errors.append(f"{file} is not JSON, as a .txt file of RACE is: {error}")
    else:
        if isinstance(passage, dict) and "article" in passage:
            yield from _race_questions(passage, str(file), _level(file), errors)
        else:
            errors.append(f"{file} is no passage of RACE: there is no article")


def _level(file: Path) -> str:
    """Return the group of RACE's questions by the names of a file and its folder."""
    for name in (file.name, file.parent.name):
        if match := _RACE_LEVELS.search(name):
            return match[1]
    return ""


def _race_questions(
    passage: Mapping[str, Any], place: str, group: str, errors: list[str]
) -> Iterator[ChoiceText]:
    fields = [passage.get(name) for name in _RACE_FIELDS]
    context = cell_text(passage["article"])
    if context is None:
        errors.append(f"{place}: no article")
    elif not all(isinstance(field, list) for field in fields):
        errors.append(f"{place}: {', '.join(_RACE_FIELDS)} must be lists")
    elif len({len(field) for field in fields if field is not None}) != 1:
        counts = ", ".join(
            f"{len(field or ())} {name}" for field, name in zip(fields, _RACE_FIELDS, strict=True)
        )
        errors.append(f"{place}: {counts}; there must be as many of each")
    else:
        lists = [field or [] for field in fields]
        for number, (question, options, answer) in enumerate(zip(*lists, strict=True), start=1):
            # Blanks stand by themselves, as in most of RACE's questions.
            text = re.sub(r"\s*_+\s*", " _ ", cell_text(question) or "").strip()
            with collecting(errors):
                yield _checked(
                    context=context,
                    question=text or None,
                    choices=options if isinstance(options, list) else [],
                    answer=answer,
                    group=group,
                    place=f"{place}, question {number}",
                )


def _question(row: Row, names: ColumnNames) -> ChoiceText:
    context = cell_text(row.values[names.text])
    if context is None:
        raise CorpusError(f"{row.location}: no text in column {names.text}")
    cells = [row.values[name] for name in names.choices]
    if None in cells:
        place = names.choices[cells.index(None)]
        raise CorpusError(f"{row.location}: the row ends before column {place}")
    choices: Any = cells[0] if len(cells) == 1 else _without_empty_end(cells)
    labels: Sequence[Any] = ()
    if isinstance(choices, Mapping):  # {"text": [...], "label": ["A", ...]}, as of ARC
        choices, labels = choices.get("text"), choices.get("label") or ()
    return _checked(
        context=context,
        question=None if names.pair is None else cell_text(row.values[names.pair]),
        choices=choices if isinstance(choices, Sequence) and not isinstance(choices, str) else [],
        answer=row.values[names.labels[0]],
        labels=labels,
        place=row.location,
    )


def _without_empty_end(cells: Sequence[Any]) -> list[Any]:
    """Return the cells up to the last that is not empty: a question may have fewer choices."""
    last = max((number for number, cell in enumerate(cells) if cell_text(cell)), default=-1)
    return list(cells[: last + 1])


def _checked(
    *,
    context: str,
    question: str | None,
    choices: Sequence[Any],
    answer: Any,
    place: str,
    labels: Sequence[Any] = (),
    group: str = "",
) -> ChoiceText:
    """Return a question whose choices and answer are right."""
    texts = [cell_text(choice) for choice in choices]
    present = tuple(text for text in texts if text is not None)
    if len(texts) < 2:
        has = "one choice" if texts else "no choices"
        raise CorpusError(f"{place}: {has}; a question needs two or more")
    if len(present) < len(texts):
        raise CorpusError(f"{place}: choice {texts.index(None)} has no text (counted from 0)")
    names = [str(label) for label in labels]
    if _is_ambiguous(answer, present, names):
        raise CorpusError(
            f"{place}: answer {answer!r} is both the index of a choice and the text of another"
        )
    label = _find_answer(answer, present, names)
    if label is None:
        last = ascii_uppercase[min(len(present), len(ascii_uppercase)) - 1]
        raise CorpusError(
            f"{place}: answer {answer!r} is none of {len(present)} choices; give its index, 0 to "
            f"{len(present) - 1}, its letter, A to {last}, or its text"
        )
    return ChoiceText(
        context=context,
        question=question,
        choices=present,
        label=label,
        group=group,
        place=place,
    )


def _find_answer(answer: Any, choices: Sequence[str], labels: Sequence[str]) -> int | None:
    """Return the index of an answer given as one of the labels, an index, a letter or a text."""
    text = cell_text(answer)
    if text is None or isinstance(answer, bool):
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
    """Whether an answer is the index of a choice, and a string that is the text of one other."""
    if not isinstance(answer, str):
        return False
    text = cell_text(answer) or ""
    if text in labels or not text.isdecimal() or int(text) >= len(choices):
        return False
    return choices.count(text) == 1 and choices.index(text) != int(text)


def groups_of(questions: Iterable[ChoiceText]) -> list[str]:
    """Return the names of the groups of questions, in the order of their first questions."""
    return [name for name in dict.fromkeys(question.group for question in questions) if name]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceExample:
    """A question with its choices; questions on one context share its tokens.

    Attributes:
        context: tokens without special ones.
        choices: the same of each choice, with its question.
        target: index of the right choice.
        length: maximum tokens of a sequence.
    """

    context: _Tokens
    choices: tuple[_Tokens, ...]
    target: int
    length: int

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sequence."""
        return [sum(self._split(choice)) + _NUM_SPECIAL for choice in self.choices]

    @property
    def is_cut(self) -> bool:
        """Whether a sequence lacks tokens of the context or the choice."""
        whole = (len(self.context) + len(choice) + _NUM_SPECIAL for choice in self.choices)
        return max(whole) > self.length

    def sequences(self, tokenizer: AlbertTokenizer) -> list[TokenisedExample]:
        """Return each as [CLS] context [SEP] question choice [SEP], cut by `split_choice`."""
        cls_id, sep_id = tokenizer.cls_id, tokenizer.sep_id
        sequences = []
        for choice in self.choices:
            num_first, num_second = self._split(choice)
            second = choice[len(choice) - num_second :].tolist()
            sequences.append(
                TokenisedExample(
                    ids=[cls_id, *self.context[:num_first].tolist(), sep_id, *second, sep_id],
                    types=[0] * (num_first + 2) + [1] * (num_second + 1),
                    target=0,  # its question has one
                )
            )
        return sequences

    def _split(self, choice: _Tokens) -> tuple[int, int]:
        return split_choice(len(self.context), len(choice), self.length)


def with_choice(question: str | None, choice: str) -> str:
    """Return a question with a choice in its blanks; after it, if it has no blanks."""
    if not question:
        return choice
    if _BLANK.search(question):
        return _BLANK.sub(lambda _: choice, question)
    return f"{question} {choice}"


def split_choice(num_context: int, num_choice: int, max_positions: int) -> tuple[int, int]:
    """Return the tokens of a context, its first, and of a choice, its last, that fit the positions.

    The context is cut first. Of a choice, which has its question before it, the last 128 tokens, or
    half of fewer positions, are kept in any case (the original's run_race).
    """
    room = max_positions - _NUM_SPECIAL
    reserved = min(_CHOICE_TOKENS, room // 2)
    num_choice = min(num_choice, max(reserved, room - num_context))
    return min(num_context, room - num_choice), num_choice


def choice_examples(
    texts: Sequence[ChoiceText], tokenizer: AlbertTokenizer, *, length: int, truncation: bool
) -> tuple[list[ChoiceExample], int]:
    """Tokenise questions, and return how many have a context or choice that is cut."""
    examples, errors, num_truncated = [], [], 0
    context: tuple[str, _Tokens] | None = None
    for text in progress(texts, title="tokenising questions", unit="questions"):
        # The questions on a passage follow each other.
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
        if example.is_cut and not truncation:
            errors.append(f"{text.place}: over {length} tokens; --truncation truncates such texts")
        num_truncated += example.is_cut
        examples.append(example)
    raise_listed(errors)
    return examples, num_truncated


def _tokens(tokenizer: AlbertTokenizer, text: str) -> _Tokens:
    return np.array(tokenizer.encode_plain(text).ids, np.int32)
