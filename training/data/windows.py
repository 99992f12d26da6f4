"""Training windows of question answering: token sequences with the answer's position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from albert_serve.tokenizer import AlbertTokenizer, Encoding
from training.data.corpus import CorpusError
from training.data.questions import Question

_NUM_SPECIAL: Final = 3


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
