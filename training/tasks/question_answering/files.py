"""Questions in SQuAD files (v1.1 and v2.0, nested or flat), and their training windows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from albert_serve.tables.formats import has_known_suffix
from albert_serve.tokenizer import AlbertTokenizer, Encoding
from training.data.batch import TokenisedExample
from training.data.corpus import CorpusError, find_files, read_lines
from training.data.labelled.cells import is_blank, locate
from training.data.labelled.rows import collecting, raise_listed, read_records

_NUM_SPECIAL: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question on a context.

    Attributes:
        answers: correct answers, or empty if the context does not answer the question.
        start: character offset of the first answer in the context, according to the file, or None
            without an answer.
        location: file and id, for messages.
        article: file and title of the context's article.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    start: int | None
    location: str = ""
    article: str = ""


class _Answer(BaseModel):
    text: str
    answer_start: int


def _as_list(answers: Any) -> Any:
    """Return a list of answers, also from the Hub's `{"text": [...], "answer_start": [...]}`."""
    if isinstance(answers, dict) and isinstance(answers.get("text"), str):
        return [answers]
    if not isinstance(answers, dict) or not all(
        isinstance(values, list) for values in answers.values()
    ):
        return answers
    num_answers = max(map(len, answers.values()), default=0)
    return [
        {name: values[i] for name, values in answers.items() if i < len(values)}
        for i in range(num_answers)
    ]


def _text(value: Any) -> Any:
    return "" if is_blank(value) else value


# A missing value becomes an empty text.
_Text: TypeAlias = Annotated[str, BeforeValidator(_text)]


class _Entry(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: str
    question: _Text
    answers: Annotated[list[_Answer] | None, BeforeValidator(_as_list)] = None
    is_impossible: bool | None = None


class _Paragraph(BaseModel):
    context: _Text
    qas: list[_Entry]


class _Article(BaseModel):
    title: str | None = None
    paragraphs: list[_Paragraph]

    @model_validator(mode="before")
    @classmethod
    def _of_row(cls, value: Any) -> Any:
        """Return an article from a row of a flat file, which has a question and its context."""
        if not isinstance(value, dict) or "paragraphs" in value or "context" not in value:
            return value
        if "answers" not in value and "answer" in value:
            answer = {"text": value["answer"], "answer_start": value.get("answer_start")}
            value = {**value, "answers": [answer]}
        paragraph = {"context": value["context"], "qas": [value]}
        return {"title": value.get("title"), "paragraphs": [paragraph]}


class _SquadFile(BaseModel):
    data: list[_Article]


def read_squad(files: Sequence[Path]) -> list[Question]:
    """Read the questions of SQuAD files, v1.1 or v2.0.

    Nested files are `.json`, optionally compressed. Flat files have a question per row, as on the
    Hub: `.jsonl`, `.parquet` and the other formats of `read_records`. In a folder, all files are
    read.

    A question has no answer if it is marked `is_impossible`, or has no `answers`. Empty questions,
    and questions on an empty context, are omitted and counted in one printed line.
    """
    questions, errors = _read(files)
    raise_listed(errors)
    return questions


def read_located(files: Sequence[Path]) -> tuple[list[Question], int]:
    """Read the questions of SQuAD files, and locate their answers.

    Returns:
        Questions, and the number of repaired offsets.
    """
    questions, errors = _read(files)
    located, num_repaired = questions, 0
    with collecting(errors):
        located, num_repaired = locate_answers(questions)
    raise_listed(errors)
    return located, num_repaired


def _read(files: Sequence[Path]) -> tuple[list[Question], list[str]]:
    """Return the questions of the files, and the errors."""
    questions: list[Question] = []
    errors: list[str] = []
    all_files: list[Path] = []
    for path in files:
        with collecting(errors):
            all_files += find_files([path])
    for file in all_files:
        is_nested = ".json" in file.suffixes or not has_known_suffix(file)
        read = _read_nested if is_nested else _read_rows
        try:
            questions += _questions(read(file), file)
        except CorpusError as error:
            errors += error.args
    complete = [item for item in questions if item.question and item.context.strip()]
    if num_omitted := len(questions) - len(complete):
        print(
            f"Omitted {num_omitted:,} of {len(questions):,} questions, because they or their "
            "contexts are empty."
        )
    if not complete and not errors:
        errors.append(f"There are no questions in {', '.join(map(str, files))}.")
    return complete, errors


def _read_nested(file: Path) -> list[_Article]:
    content = "".join(read_lines(file))
    if _has_rows(content):
        return _read_rows(file)
    try:
        return _SquadFile.model_validate_json(content).data
    except ValidationError as error:
        raise CorpusError(*_messages(error, str(file))) from error


def _has_rows(content: str) -> bool:
    """Return whether JSON is an array, or has one question with its context per line."""
    content = content.lstrip("\ufeff \t\r\n")
    try:
        return content.startswith("[") or "context" in json.loads(content.partition("\n")[0])
    except (ValueError, TypeError, RecursionError):
        return False


def _read_rows(file: Path) -> list[_Article]:
    articles: list[_Article] = []
    errors: list[str] = []
    for row in read_records(file, errors):
        try:
            articles.append(_Article.model_validate(row.values))
        except ValidationError as error:
            errors += _messages(error, row.location)
    raise_listed(errors)
    return articles


def _messages(error: ValidationError, location: str) -> list[str]:
    return [
        f"{location} is not in SQuAD's format: {_path(detail['loc'])}: {detail['msg']}."
        for detail in error.errors()
    ]


def _path(keys: Sequence[str | int]) -> str:
    return ".".join(map(str, keys)) or "the file"


def _questions(articles: Sequence[_Article], file: Path) -> Iterator[Question]:
    for number, article in enumerate(articles):
        for paragraph in article.paragraphs:
            for entry in paragraph.qas:
                answers = [] if entry.is_impossible else entry.answers or []
                yield Question(
                    id=entry.id,
                    question=entry.question.strip(),
                    context=paragraph.context,
                    answers=tuple(answer.text for answer in answers),
                    start=answers[0].answer_start if answers else None,
                    location=f"{file}, question {entry.id}",
                    article=f"{file}: {article.title or number}",
                )


def locate_answers(questions: Sequence[Question]) -> tuple[list[Question], int]:
    """Check that each first answer is at its offset, and repair unambiguous offsets.

    Returns:
        Questions, and the number of repaired offsets.
    """
    located: list[Question] = []
    errors: list[str] = []
    for question in questions:
        result = _locate_answer(question)
        if isinstance(result, str):
            errors.append(f"{question.location}: {result}")
        else:
            located.append(result)
    raise_listed(errors)
    pairs = zip(questions, located, strict=True)
    return located, sum(question is not repaired for question, repaired in pairs)


def _locate_answer(question: Question) -> Question | str:
    """Return the question with the offset of its answer, or an error."""
    if question.start is None:
        return question
    answer, start, context = question.answers[0], question.start, question.context
    if not answer.strip():
        return "The answer is empty. Mark the question is_impossible, or remove it."
    if start >= 0 and context.startswith(answer, start):
        return question
    answer = answer.strip()
    try:
        start = locate(answer, context, start)
    except ValueError as error:
        return f"answer_start: {error}"
    return replace(question, answers=(answer, *question.answers[1:]), start=start)


def span_examples(
    question: Question,
    tokenizer: AlbertTokenizer,
    *,
    length: int,
    stride: int = 128,
    max_question: int = 64,
) -> Iterator[TokenisedExample]:
    """Yield the windows of one question: [CLS] question [SEP] part of the context [SEP].

    The targets are the positions of the answer's first and last token. Both are 0, the [CLS], if
    the window does not contain the answer.

    Args:
        question: question whose answer is at its offset (`locate_answers`).
        length: maximum number of tokens in a window.
        stride: number of tokens between the beginnings of two windows. Short windows have a smaller
            stride, so that neighbours share a quarter.
        max_question: maximum number of tokens in a question, or half of a short window. Longer
            questions are truncated, as in run_squad of the original code.
    """
    query = tokenizer.encode_plain(question.question)
    query = query.slice(0, min(max_question, (length - _NUM_SPECIAL) // 2))
    context = tokenizer.encode_plain(question.context)
    room = length - len(query) - _NUM_SPECIAL
    first, last = _answer_tokens(question, context)
    for begin in range(0, max(len(context), 1), min(stride, room - room // 4)):
        window = tokenizer.build(query, context.slice(begin, begin + room))
        inside = first is not None and begin <= first and last < begin + room
        shift = len(query) + 2 - begin
        target = (first + shift, last + shift) if inside and first is not None else (0, 0)
        yield TokenisedExample(ids=window.ids, types=window.types, target=target)
        if begin + room >= len(context):
            break


def _answer_tokens(question: Question, context: Encoding) -> tuple[int | None, int]:
    """Return the first and last token that overlap the answer, or (None, -1) if none does."""
    if question.start is None:
        return None, -1
    stop = question.start + len(question.answers[0])
    overlapping = [
        index
        for index, (begin, end) in enumerate(context.offsets)
        if begin < stop and end > question.start
    ]
    return (overlapping[0], overlapping[-1]) if overlapping else (None, -1)
