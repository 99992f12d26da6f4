"""Questions of SQuAD files, v1.1 and v2.0, nested or a row each, and their training windows."""

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
        answers: the correct answers; empty if the context has none.
        start: character offset of the first answer in the context, as the file has it; None
            without an answer.
        place: file and id, for messages.
        article: file and title of the article of the context.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    start: int | None
    place: str = ""
    article: str = ""


class _Answer(BaseModel):
    text: str
    answer_start: int


def _as_list(answers: Any) -> Any:
    """Return answers as a list; the Hub's files have `{"text": [...], "answer_start": [...]}`."""
    if isinstance(answers, dict) and isinstance(answers.get("text"), str):
        return [answers]
    if not isinstance(answers, dict) or not all(isinstance(one, list) for one in answers.values()):
        return answers
    num_answers = max(map(len, answers.values()), default=0)
    return [
        {name: values[i] for name, values in answers.items() if i < len(values)}
        for i in range(num_answers)
    ]


def _text(value: Any) -> Any:
    return "" if is_blank(value) else value


# A cell without a value is an empty text.
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
        """Return a row of a flat file, which has one question with its context, as an article."""
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

    `.json`, optionally compressed; or rows of a question each, as the Hub has them: `.jsonl`,
    `.parquet`, and what else `read_records` reads. In place of a folder stand its files.
    A question has no answer if it is marked `is_impossible`, or has no `answers`. One that is
    empty, or whose context is, is left out, and a line counts them.
    """
    questions, errors = _read(files)
    raise_listed(errors)
    return questions


def read_located(files: Sequence[Path]) -> tuple[list[Question], int]:
    """Read the questions of SQuAD files, with their answers located.

    Returns:
        The questions, and how many of them were repaired.
    """
    questions, errors = _read(files)
    located, num_repaired = questions, 0
    with collecting(errors):
        located, num_repaired = locate_answers(questions)
    raise_listed(errors)
    return located, num_repaired


def _read(files: Sequence[Path]) -> tuple[list[Question], list[str]]:
    """Return the questions of the files, and the faults in them."""
    questions: list[Question] = []
    errors: list[str] = []
    found: list[Path] = []
    for path in files:
        with collecting(errors):
            found += find_files([path])
    for file in found:
        is_nested = ".json" in file.suffixes or not has_known_suffix(file)
        read = _read_nested if is_nested else _read_rows
        try:
            questions += _questions(read(file), file)
        except CorpusError as error:
            errors += error.args
    asked = [each for each in questions if each.question and each.context.strip()]
    if num_empty := len(questions) - len(asked):
        print(
            f"{num_empty:,} of {len(questions):,} questions are left out: empty, or of no context"
        )
    if not asked and not errors:
        errors.append(f"no questions in {', '.join(map(str, files))}")
    return asked, errors


def _read_nested(file: Path) -> list[_Article]:
    content = "".join(read_lines(file))
    if _has_rows(content):
        return _read_rows(file)
    try:
        return _SquadFile.model_validate_json(content).data
    except ValidationError as error:
        raise CorpusError(*_messages(error, str(file))) from error


def _has_rows(content: str) -> bool:
    """Whether JSON is an array, or lines of questions with their contexts."""
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


def _messages(error: ValidationError, place: str) -> list[str]:
    return [
        f"{place} is not in SQuAD's format: {_path(each['loc'])}: {each['msg']}"
        for each in error.errors()
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
                    place=f"{file}, question {entry.id}",
                    article=f"{file}: {article.title or number}",
                )


def locate_answers(questions: Sequence[Question]) -> tuple[list[Question], int]:
    """Check that each first answer stands at its offset, and repair offsets that are unambiguous.

    Returns:
        The questions, and how many of them were repaired.
    """
    located: list[Question] = []
    errors: list[str] = []
    for question in questions:
        fitting = _located(question)
        if isinstance(fitting, str):
            errors.append(f"{question.place}: {fitting}")
        else:
            located.append(fitting)
    raise_listed(errors)
    return located, sum(one is not other for one, other in zip(questions, located, strict=True))


def _located(question: Question) -> Question | str:
    """Return the question with the place of its answer, or why there is none."""
    if question.start is None:
        return question
    answer, start, context = question.answers[0], question.start, question.context
    if not answer.strip():
        return "the answer is empty; mark the question is_impossible, or leave it out"
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

    Each begins `stride` tokens after the previous one. The targets are the positions of the
    answer's first and last token; 0, the [CLS], where a window has no answer.

    The question is cut to `max_question` tokens, as in the original's run_squad, or to half of a
    short window. Short windows have a smaller stride, so that neighbours share a quarter. The
    answer must stand at its offset (`locate_answers`).
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
    """Return the first and last token that overlap the answer; (None, -1) if none does."""
    if question.start is None:
        return None, -1
    stop = question.start + len(question.answers[0])
    touched = [
        index
        for index, (begin, end) in enumerate(context.offsets)
        if begin < stop and end > question.start
    ]
    return (touched[0], touched[-1]) if touched else (None, -1)
