"""Extractive question answering: the part of a context that answers a question.

A context of any length is read in overlapping windows, `[CLS] question [SEP] window [SEP]`, whose
logits are merged to those of one document before normalisation (`tasks/windows.py`). So scores are
comparable across a long context and never exceed 1 (`spans.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from albert_serve.api.schemas import (
    Answer,
    QuestionAnsweringAnswer,
    QuestionAnsweringParameters,
    QuestionContext,
)
from albert_serve.errors import InvalidInputError, TextTooLongError
from albert_serve.tasks.base import ENTRY_BYTES, EncoderInput, Logits, Prepared, TaskSetup
from albert_serve.tasks.question_answering.spans import Spans, align, find_spans, strip
from albert_serve.tasks.windows import Windows, lay_windows
from albert_serve.tokenizer import AlbertTokenizer, Encoding

# Tokens of a window, or as many as the model has positions.
DEFAULT_MAX_SEQ_LEN: Final = 384
_DEFAULT_DOC_STRIDE: Final = 128
_NUM_SPECIAL: Final = 3
# The limit of how often windows read the same token, which bounds the work of a request.
_MAX_READINGS: Final = 16
_MAX_READ_TOKENS: Final = 1 << 20
# The limit of context tokens times answer tokens; it takes seconds at most.
_MAX_SPANS: Final = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedQuestion:
    """A question ready for the engine, which finds its answers from the logits.

    Attributes:
        inputs: one for each window.
        num_truncated: tokens of the question that were cut off.
        context: the tokens of `text`.
        threshold: the null score over which the answer is "no answer".
        may_be_empty: whether "no answer" is one.
    """

    inputs: list[EncoderInput]
    num_truncated: int
    windows: Windows
    context: Encoding
    text: str
    parameters: QuestionAnsweringParameters
    threshold: float
    may_be_empty: bool

    def find(self, logits: Sequence[Logits]) -> Spans:
        """Return the best spans of the context.

        Args:
            logits: start and end logits (S, 2) of each window, in order.
        """
        offsets = strip(self.context.offsets, self.text)
        if self.parameters.align_to_words:
            offsets = align(offsets, self.text)
        return find_spans(
            merge_windows(self.windows, logits),
            offsets,
            max_answer_len=self.parameters.max_answer_len,
            top_k=self.parameters.top_k,
        )

    def finish(self, logits: Sequence[Logits]) -> QuestionAnsweringAnswer:
        """Return the answers, best first; a list if more than one is asked for.

        Args:
            logits: as for `find`.
        """
        spans = self.find(logits)
        scores, no_answer = spans.scores(self.threshold)
        answers = [
            Answer(
                answer=self.text[span.start : span.end],
                score=score,
                start=span.start,
                end=span.end,
            )
            for span, score in zip(spans.best, scores, strict=True)
        ]
        if self.may_be_empty or not answers:
            answers.append(Answer(answer="", score=no_answer, start=0, end=0))
        answers.sort(key=lambda answer: -answer.score)
        top_k = self.parameters.top_k
        return answers[:top_k] if top_k > 1 else answers[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionAnswering:
    """Finds answers in contexts of any length.

    Attributes:
        null_score_diff_threshold: the default of the parameter; a model that has one gives no
            answer by default.
    """

    tokenizer: AlbertTokenizer
    max_positions: int
    null_score_diff_threshold: float | None = None

    @classmethod
    def open(cls, setup: TaskSetup) -> QuestionAnswering:
        """Return the task for a model."""
        return cls(
            tokenizer=setup.tokenizer,
            max_positions=setup.max_positions,
            null_score_diff_threshold=setup.head.null_score_diff_threshold,
        )

    def prepare(
        self, item: QuestionContext, parameters: QuestionAnsweringParameters
    ) -> Prepared[QuestionAnsweringAnswer]:
        """Encode one question with its context; one input a window.

        A question is cut only if the caller allows it: to `max_question_len`, or with `truncation`
        to half of the sequence.
        """
        asked = self.ask(item, parameters)
        return Prepared(
            inputs=asked.inputs,
            finish=asked.finish,
            num_truncated=asked.num_truncated,
            answer_bytes=_answer_bytes(parameters, asked.context),
        )

    def ask(self, item: QuestionContext, parameters: QuestionAnsweringParameters) -> AskedQuestion:
        """Encode one question with its context."""
        question, context = self._encode(item)
        max_seq_len = self._max_seq_len(parameters)
        kept = question.slice(0, _num_kept(len(question), parameters, max_seq_len))
        room = max_seq_len - len(kept) - _NUM_SPECIAL
        if room < 1:
            raise TextTooLongError(
                f"the question is {len(kept)} tokens, which leaves no room for the context in a "
                f"sequence of {max_seq_len}, {_NUM_SPECIAL} of them special; shorten the question, "
                "cut it by the parameter truncation or max_question_len, or raise max_seq_len"
            )
        overlap = _overlap(parameters, max_seq_len, room) if len(context) > room else 0
        windows = lay_windows(len(context), room, overlap, num_before=len(kept) + 2)
        _check_work(windows, max_seq_len, overlap)
        _check_spans(len(context), parameters.max_answer_len)
        own, threshold = self.null_score_diff_threshold, parameters.null_score_diff_threshold
        may_be_empty = parameters.handle_impossible_answer
        return AskedQuestion(
            inputs=[self._input(kept, context.slice(*bounds)) for bounds in windows.ranges],
            num_truncated=len(question) - len(kept),
            windows=windows,
            context=context,
            text=item.context,
            parameters=parameters,
            threshold=(own or 0.0) if threshold is None else threshold,
            may_be_empty=own is not None if may_be_empty is None else may_be_empty,
        )

    def _encode(self, item: QuestionContext) -> tuple[Encoding, Encoding]:
        encodings = []
        for name, text in (("question", item.question), ("context", item.context)):
            encoding = self.tokenizer.encode_plain(text)
            if not text.strip() or not len(encoding):
                raise InvalidInputError(f"{name} is empty; both question and context are needed")
            encodings.append(encoding)
        return encodings[0], encodings[1]

    def _max_seq_len(self, parameters: QuestionAnsweringParameters) -> int:
        value = parameters.max_seq_len
        if value is None:
            return min(self.max_positions, DEFAULT_MAX_SEQ_LEN)
        if value > self.max_positions:
            raise InvalidInputError(
                f"max_seq_len is {value}; the model reads at most {self.max_positions} tokens"
            )
        return value

    def _input(self, question: Encoding, window: Encoding) -> EncoderInput:
        pair = self.tokenizer.build(question, window)
        return EncoderInput(ids=pair.ids, types=pair.types, task="question-answering", rows=None)


def merge_windows(windows: Windows, logits: Sequence[Logits]) -> Logits:
    """Return the logits of "no answer" and of the N context tokens; (1 + N, 2).

    "No answer" is read at [CLS] of the window with the smallest logits: an answer in one window is
    an answer in the document.
    """
    no_answer = min((window[0] for window in logits), key=lambda row: float(row.sum()))
    return np.concatenate([no_answer[None], windows.stitch(logits)])


def _num_kept(num_question: int, parameters: QuestionAnsweringParameters, max_seq_len: int) -> int:
    """Return the tokens of the question that are kept: all, unless the caller allows a cut."""
    if parameters.max_question_len is not None:
        return min(num_question, parameters.max_question_len)
    if parameters.truncation == "truncate":
        return min(num_question, max_seq_len // 2)
    return num_question


def _overlap(parameters: QuestionAnsweringParameters, max_seq_len: int, room: int) -> int:
    value = parameters.doc_stride
    if value is None:
        # At most half of the room, so that a long question does not multiply the windows.
        return min(_DEFAULT_DOC_STRIDE, max_seq_len // 2, room // 2)
    if value >= room:
        raise InvalidInputError(
            f"doc_stride is {value}, but beside the question a window holds {room} tokens; "
            f"choose at most {room - 1}, or leave it out"
        )
    return value


def _check_work(windows: Windows, max_seq_len: int, overlap: int) -> None:
    num_tokens, num_laid = windows.num_tokens, len(windows.ranges)
    num_read = num_laid * max_seq_len
    if num_read > _MAX_READINGS * max(num_tokens, max_seq_len) or num_read > _MAX_READ_TOKENS:
        raise InvalidInputError(
            f"a context of {num_tokens} tokens would take {num_laid} windows of {max_seq_len} "
            f"tokens that share {overlap}; shorten the question or the context, or lower "
            "doc_stride"
        )


def _check_spans(num_tokens: int, max_answer_len: int) -> None:
    if num_tokens * min(num_tokens, max_answer_len) > _MAX_SPANS:
        raise InvalidInputError(
            f"a context of {num_tokens} tokens has too many parts of up to {max_answer_len} "
            f"tokens; lower max_answer_len to {_MAX_SPANS // num_tokens}, or shorten the context"
        )


def _answer_bytes(parameters: QuestionAnsweringParameters, context: Encoding) -> int:
    """Return the memory of the answers, which are parts of the context."""
    last = min(parameters.max_answer_len, len(context)) - 1
    longest = max(
        end - start
        for (start, _), (_, end) in zip(context.offsets, context.offsets[last:], strict=False)
    )
    num_answers = min(parameters.top_k, len(context) * (last + 1))
    return num_answers * (ENTRY_BYTES + longest)
