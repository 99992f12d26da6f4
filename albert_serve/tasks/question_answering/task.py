"""Extractive question answering: the part of a context that answers a question.

A context of any length is read in overlapping windows, `[CLS] question [SEP] window [SEP]`. Their
logits are merged into one document before normalisation (`tasks/windows.py`). So scores are
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
from albert_serve.tasks.windows import Windows, make_windows
from albert_serve.tokenizer import AlbertTokenizer, Encoding

# Windows have at most this many tokens, even if the model has more positions.
DEFAULT_MAX_SEQ_LEN: Final = 384
_DEFAULT_DOC_STRIDE: Final = 128
_NUM_SPECIAL: Final = 3
# Windows read a token at most this often, on average. This limits the work of a request.
_MAX_READINGS: Final = 16
_MAX_READ_TOKENS: Final = 1 << 20
# Maximum product of context and answer tokens. This many spans take a few seconds.
_MAX_SPANS: Final = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedQuestion:
    """An encoded question, which finds its answers from the engine's logits.

    Attributes:
        inputs: encoder input of each window.
        num_truncated: number of truncated tokens of the question.
        context: tokens of `text`.
        threshold: null score above which the answer is "no answer".
        may_be_empty: whether "no answer" is a possible answer.
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
        """Return the best answer, or a list of answers, best first, if `top_k` is more than 1.

        Args:
            logits: start and end logits (S, 2) of each window, in order.
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
    """The task that finds answers in contexts of any length.

    Attributes:
        null_score_diff_threshold: default of the parameter with this name. If a model has a
            threshold, "no answer" is a possible answer by default.
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
        """Encode one question with its context, as one input per window.

        A question is truncated only if the caller allows it: to `max_question_len` if this is set,
        or to half of the sequence if `truncation` is set.
        """
        question = self.prepare_question(item, parameters)
        return Prepared(
            inputs=question.inputs,
            finish=question.finish,
            num_truncated=question.num_truncated,
            answer_bytes=_answer_bytes(parameters, question.context),
        )

    def prepare_question(
        self, item: QuestionContext, parameters: QuestionAnsweringParameters
    ) -> PreparedQuestion:
        """Encode one question with its context."""
        full_question, context = self._encode(item)
        max_seq_len = self._max_seq_len(parameters)
        question = full_question.slice(
            0, _max_question_len(len(full_question), parameters, max_seq_len)
        )
        window_size = max_seq_len - len(question) - _NUM_SPECIAL
        if window_size < 1:
            raise TextTooLongError(
                f"The question has {len(question)} tokens, which leaves no room for the context in "
                f"a sequence of {max_seq_len} ({_NUM_SPECIAL} of them special). Shorten the "
                "question, set truncation or max_question_len, or raise max_seq_len."
            )
        overlap = (
            _overlap(parameters, max_seq_len, window_size) if len(context) > window_size else 0
        )
        windows = make_windows(len(context), window_size, overlap, num_before=len(question) + 2)
        _check_work(windows, max_seq_len, overlap)
        _check_spans(len(context), parameters.max_answer_len)
        default, threshold = self.null_score_diff_threshold, parameters.null_score_diff_threshold
        may_be_empty = parameters.handle_impossible_answer
        return PreparedQuestion(
            inputs=[self._input(question, context.slice(*bounds)) for bounds in windows.ranges],
            num_truncated=len(full_question) - len(question),
            windows=windows,
            context=context,
            text=item.context,
            parameters=parameters,
            threshold=(default or 0.0) if threshold is None else threshold,
            may_be_empty=default is not None if may_be_empty is None else may_be_empty,
        )

    def _encode(self, item: QuestionContext) -> tuple[Encoding, Encoding]:
        encodings = []
        for name, text in (("question", item.question), ("context", item.context)):
            encoding = self.tokenizer.encode_plain(text)
            if not text.strip() or not len(encoding):
                raise InvalidInputError(f"{name} is empty. Send both question and context.")
            encodings.append(encoding)
        return encodings[0], encodings[1]

    def _max_seq_len(self, parameters: QuestionAnsweringParameters) -> int:
        value = parameters.max_seq_len
        if value is None:
            return min(self.max_positions, DEFAULT_MAX_SEQ_LEN)
        if value > self.max_positions:
            raise InvalidInputError(
                f"max_seq_len is {value}, but the model reads at most {self.max_positions} tokens. "
                "Lower max_seq_len."
            )
        return value

    def _input(self, question: Encoding, window: Encoding) -> EncoderInput:
        pair = self.tokenizer.build(question, window)
        return EncoderInput(ids=pair.ids, types=pair.types, task="question-answering", rows=None)


def merge_windows(windows: Windows, logits: Sequence[Logits]) -> Logits:
    """Return the logits of "no answer" and of the context tokens (1 + N, 2).

    The logits of "no answer" are the lowest at [CLS] of all windows, because an answer in one
    window is an answer in the document.
    """
    no_answer = min((window[0] for window in logits), key=lambda row: float(row.sum()))
    return np.concatenate([no_answer[None], windows.stitch(logits)])


def _max_question_len(
    num_question: int, parameters: QuestionAnsweringParameters, max_seq_len: int
) -> int:
    """Return how many tokens of a question are read: all, unless it may be truncated."""
    if parameters.max_question_len is not None:
        return min(num_question, parameters.max_question_len)
    if parameters.truncation == "truncate":
        return min(num_question, max_seq_len // 2)
    return num_question


def _overlap(parameters: QuestionAnsweringParameters, max_seq_len: int, window_size: int) -> int:
    value = parameters.doc_stride
    if value is None:
        # A long question leaves small windows, which must still advance by half their size.
        return min(_DEFAULT_DOC_STRIDE, max_seq_len // 2, window_size // 2)
    if value >= window_size:
        raise InvalidInputError(
            f"doc_stride is {value}, but a window has only {window_size} tokens next to the "
            f"question. Use at most {window_size - 1}, or omit doc_stride."
        )
    return value


def _check_work(windows: Windows, max_seq_len: int, overlap: int) -> None:
    num_tokens, num_windows = windows.num_tokens, len(windows.ranges)
    num_read = num_windows * max_seq_len
    if num_read > _MAX_READINGS * max(num_tokens, max_seq_len) or num_read > _MAX_READ_TOKENS:
        raise InvalidInputError(
            f"A context of {num_tokens} tokens would take {num_windows} windows of {max_seq_len} "
            f"tokens that share {overlap}. Shorten the question or the context, or lower "
            "doc_stride."
        )


def _check_spans(num_tokens: int, max_answer_len: int) -> None:
    if num_tokens * min(num_tokens, max_answer_len) > _MAX_SPANS:
        raise InvalidInputError(
            f"A context of {num_tokens} tokens has too many possible answers of up to "
            f"{max_answer_len} tokens. Lower max_answer_len to {_MAX_SPANS // num_tokens}, or "
            "shorten the context."
        )


def _answer_bytes(parameters: QuestionAnsweringParameters, context: Encoding) -> int:
    """Return the approximate memory of the answers, which are parts of the context."""
    last = min(parameters.max_answer_len, len(context)) - 1
    max_chars = max(
        end - start
        for (start, _), (_, end) in zip(context.offsets, context.offsets[last:], strict=False)
    )
    num_answers = min(parameters.top_k, len(context) * (last + 1))
    return num_answers * (ENTRY_BYTES + max_chars)
