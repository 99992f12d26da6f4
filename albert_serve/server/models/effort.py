"""The effort of reading a request and of writing its answer, before either is begun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from pydantic import BaseModel

from albert_serve.api.schemas import (
    ChoiceQuestion,
    QuestionAnsweringParameters,
    SentenceOrderRequest,
    Sentences,
    TaskRequest,
)
from albert_serve.server.process.threads import Effort
from albert_serve.tasks import Prepared
from albert_serve.tokenizer import count_normalised

# Some 1 and 10 ms of `_work`, and of the bytes of an answer.
_SMALL_WORK: Final = 1 << 10
_LARGE_WORK: Final = 1 << 14
_SMALL_ANSWER_BYTES: Final = 1 << 16
_LARGE_ANSWER_BYTES: Final = 1 << 19
# The bytes of an answer that take as long as the best tokens of a row of logits, and as the
# logits of an input.
_BYTES_PER_WIDE_ROW: Final = 1 << 15
_BYTES_PER_INPUT: Final = 1 << 12
# What a text takes beside its characters.
_CHARS_PER_TEXT: Final = 100


def effort_of(request: TaskRequest) -> Effort:
    """Return the effort of reading a request; it is read until it is large only."""
    is_reordered = isinstance(request, SentenceOrderRequest) and request.parameters.reorder
    work = 0
    for part in _work([request.inputs, request.parameters], is_reordered):
        work += part
        if work > _LARGE_WORK:
            break
    return _effort(work, _SMALL_WORK, _LARGE_WORK)


def effort_of_answer(prepared: Sequence[Prepared[Any]]) -> Effort:
    """Return the effort of reading the logits of inputs, and of writing the reply."""
    num_bytes = sum(
        item.answer_bytes
        + item.num_vocabulary_rows * _BYTES_PER_WIDE_ROW
        + len(item.inputs) * _BYTES_PER_INPUT
        for item in prepared
    )
    return _effort(num_bytes, _SMALL_ANSWER_BYTES, _LARGE_ANSWER_BYTES)


def _effort(amount: int, small: int, large: int) -> Effort:
    if amount <= small:
        return Effort.SMALL
    return Effort.LARGE if amount > large else Effort.MEDIUM


def _work(value: object, is_reordered: bool) -> Iterator[int]:
    """Yield the work of reading each part of a value of a request, in normalised characters.

    Args:
        is_reordered: whether each sentence of a list is read with every other.
    """
    if isinstance(value, str):
        yield _CHARS_PER_TEXT + len(value)
        yield count_normalised(value) - len(value)  # not reached, if the text alone is large
    elif isinstance(value, Sentences) and is_reordered:
        yield _CHARS_PER_TEXT * len(value.sentences) ** 2
        yield from _work(value.sentences, is_reordered)
    elif isinstance(value, ChoiceQuestion):  # each choice is read with the question
        question = value.question or ""
        yield len(question) * len(value.choices)
        yield (count_normalised(question) - len(question)) * len(value.choices)
        yield question.count("_") * sum(map(len, value.choices))
        yield from _work([value.context, *value.choices], is_reordered)
    elif isinstance(value, QuestionAnsweringParameters):
        if value.max_seq_len is not None or value.doc_stride is not None:
            yield _SMALL_WORK + 1  # a short context may have many windows
    elif isinstance(value, BaseModel):
        for part in vars(value).values():
            yield from _work(part, is_reordered)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _work(part, is_reordered)
