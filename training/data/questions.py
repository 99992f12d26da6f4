"""Questions of SQuAD files, v1.1 and v2.0."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data.corpus import CorpusError, read_lines


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
