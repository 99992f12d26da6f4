"""Questions of SQuAD files, v1.1 and v2.0, and their training windows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from albert_serve.tokenizer import AlbertTokenizer, Encoding
from training.data.corpus import CorpusError, read_lines
from training.data.labelled.errors import raise_listed

_WRONG_FORM: Final = (KeyError, TypeError, IndexError, AttributeError)
_NUM_SPECIAL: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question on a context.

    Attributes:
        answers: the correct answers; empty if the context has none.
        start: character offset of the first answer in the context, as the file has it; None
            without an answer.
        place: file and id, for messages.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    start: int | None
    place: str = ""


def read_squad(files: Sequence[Path]) -> list[Question]:
    """Read the questions of SQuAD files, v1.1 or v2.0 (JSON, optionally compressed).

    A question has no answer if it is marked `is_impossible`, or if its `answers` are empty.

    Raises:
        CorpusError: files cannot be read or are not in that format; all such files and questions
            are listed.
    """
    questions, errors = _read(files)
    raise_listed(errors)
    return questions


def some_unanswerable(files: Sequence[Path]) -> bool:
    """Whether some questions of SQuAD files have no answer; what cannot be read is passed over."""
    questions, _ = _read(files)
    return any(not question.answers for question in questions)


def _read(files: Sequence[Path]) -> tuple[list[Question], list[str]]:
    """Return the questions of the files, and what is wrong in them."""
    questions: list[Question] = []
    errors: list[str] = []
    for file in files:
        for read in _file_questions(file):
            if isinstance(read, Question):
                questions.append(read)
            else:
                errors.append(read)
    if not questions and not errors:
        errors.append(f"no questions in {', '.join(map(str, files))}")
    return questions, errors


def _file_questions(file: Path) -> Iterator[Question | str]:
    """Yield the questions of a file, and each error."""
    try:
        yield from _questions(json.loads("".join(read_lines(file))), file)
    except CorpusError as error:
        yield str(error)
    except json.JSONDecodeError as error:
        yield f"{file} is not JSON: {error}; is it complete?"
    except _WRONG_FORM as error:
        yield f"{file} is not in SQuAD's format: {error!r}"


def _questions(content: dict[str, Any], file: Path) -> Iterator[Question | str]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for record in paragraph["qas"]:
                place = f"{file}, a question"
                try:
                    place = f"{file}, question {record['id']}"
                    yield _question(record, paragraph["context"], place)
                except _WRONG_FORM as error:
                    yield f"{place}, is not in SQuAD's format: {error!r}"


def _question(record: dict[str, Any], context: str, place: str) -> Question:
    answers = [] if record.get("is_impossible") is True else record["answers"]
    _check_answers(answers, record["id"])
    return Question(
        id=record["id"],
        question=record["question"].strip(),
        context=context,
        answers=tuple(answer["text"] for answer in answers),
        start=answers[0]["answer_start"] if answers else None,
        place=place,
    )


def _check_answers(answers: Any, question_id: str) -> None:
    """Raise a TypeError for answers that are not texts with the places where they start."""
    for answer in answers:
        text, start = answer["text"], answer["answer_start"]
        if not isinstance(text, str) or not isinstance(start, int):
            raise TypeError(
                f"an answer to {question_id} has text {text!r} and answer_start {start!r}"
            )


def read_located(files: Sequence[Path]) -> tuple[list[Question], int]:
    """Read the questions of SQuAD files, with their answers located.

    Returns:
        The questions, and how many of them were repaired.

    Raises:
        CorpusError: as `read_squad` and `locate_answers`, or a question or context is empty; all
            of it is listed at once.
    """
    questions, errors = _read(files)
    located, misplaced = _locate(questions)
    empty = [
        f"{each.place}: the question or its context is empty"
        for each in questions
        if not (each.question and each.context.strip())
    ]
    raise_listed([*errors, *misplaced, *empty])
    return located, _num_repaired(questions, located)


def locate_answers(questions: Sequence[Question]) -> tuple[list[Question], int]:
    """Check that each first answer stands at its offset, and repair offsets that are unambiguous.

    An answer that stands elsewhere is taken from the only place where the context has it, or from
    the only one that overlaps the place of its offset.

    Returns:
        The questions, and how many of them were repaired.

    Raises:
        CorpusError: other answers do not stand at their offsets; all such questions are listed.
    """
    located, errors = _locate(questions)
    raise_listed(errors)
    return located, _num_repaired(questions, located)


def _locate(questions: Sequence[Question]) -> tuple[list[Question], list[str]]:
    """Return the questions whose answers have a place, and the errors of the others."""
    located: list[Question] = []
    errors: list[str] = []
    for question in questions:
        fitting = _located(question)
        if isinstance(fitting, str):
            errors.append(f"{question.place}: {fitting}")
        else:
            located.append(fitting)
    return located, errors


def _num_repaired(questions: Sequence[Question], located: Sequence[Question]) -> int:
    return sum(one is not other for one, other in zip(questions, located, strict=True))


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
    places = [match.start() for match in re.finditer(f"(?={re.escape(answer)})", context)]
    if len(places) != 1:
        near = [place for place in places if abs(place - start) < len(answer)]
        if len(near) != 1:
            there = context[start : start + len(answer)] if start >= 0 else ""
            return (
                f"the context has {there!r} at character {start}, not the answer {answer!r}, which "
                f"stands at {len(places)} places; correct answer_start, or leave the question out"
            )
        places = near
    return replace(question, answers=(answer, *question.answers[1:]), start=places[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanExample:
    """One window: [CLS] question [SEP] part of the context [SEP].

    Attributes:
        start: position of the answer's first token; 0, the [CLS], if the window has no answer.
        end: position of the answer's last token.
    """

    ids: list[int]
    types: list[int]
    start: int
    end: int

    @property
    def target(self) -> tuple[int, int]:
        """Start and end."""
        return self.start, self.end


def span_examples(
    question: Question,
    tokenizer: AlbertTokenizer,
    *,
    length: int,
    stride: int = 128,
    max_question: int = 64,
) -> Iterator[SpanExample]:
    """Yield the windows of one question; each begins `stride` tokens after the previous one.

    The question is cut to `max_question` tokens, as in the original's run_squad, or to half of a
    short window. Short windows have a smaller stride, so that neighbours share a quarter.

    Raises:
        CorpusError: the context does not have the answer at its offset.
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
        yield SpanExample(
            ids=window.ids,
            types=window.types,
            start=first + shift if inside and first is not None else 0,
            end=last + shift if inside else 0,
        )
        if begin + room >= len(context):
            break


def _answer_tokens(question: Question, context: Encoding) -> tuple[int | None, int]:
    """Return the first and last token that overlap the answer; (None, -1) if none does."""
    if question.start is None:
        return None, -1
    stop = question.start + len(question.answers[0])
    if question.start < 0 or question.context[question.start : stop] != question.answers[0]:
        raise CorpusError(
            f"question {question.id}: the context has {question.context[question.start : stop]!r} "
            f"at character {question.start}, not the answer {question.answers[0]!r}"
        )
    touched = [
        index
        for index, (begin, end) in enumerate(context.offsets)
        if begin < stop and end > question.start
    ]
    return (touched[0], touched[-1]) if touched else (None, -1)
