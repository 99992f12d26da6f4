"""The answers to a question from the logits of its windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from albert_serve.api.schemas import Answer, QuestionAnsweringAnswer, QuestionAnsweringParameters
from albert_serve.bundle.weights import QuestionHead
from albert_serve.tasks.base import Logits
from albert_serve.tasks.question_answering.beams import find_beams
from albert_serve.tasks.question_answering.spans import Spans, align, find_spans, strip
from albert_serve.tasks.question_answering.windows import Windows
from albert_serve.tokenizer import Encoding


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanDecoder:
    """Finds the answers of one question.

    Attributes:
        context: the tokens of `text`.
        threshold: the null score over which the answer is "no answer".
        head: which head the logits are of.
    """

    windows: Windows
    context: Encoding
    text: str
    parameters: QuestionAnsweringParameters
    threshold: float
    head: QuestionHead = "independent"

    def find(self, logits: Sequence[Logits]) -> Spans:
        """Return the best spans of the context.

        Args:
            logits: for each window, in order: (S, 2), or of a start-conditioned head (1 + n, K) of
                [CLS] and the n tokens of context.
        """
        offsets = strip(self.context.offsets, self.text)
        if self.parameters.align_to_words:
            offsets = align(offsets, self.text)
        longest, top_k = self.parameters.max_answer_len, self.parameters.top_k
        if self.head == "start-conditioned":
            return find_beams(self.windows, logits, offsets, max_answer_len=longest)
        stitched = self.windows.stitch(logits)
        return find_spans(stitched, offsets, max_answer_len=longest, top_k=top_k)

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
        if self.parameters.handle_impossible_answer or not answers:
            answers.append(Answer(answer="", score=no_answer, start=0, end=0))
        answers.sort(key=lambda answer: -answer.score)
        top_k = self.parameters.top_k
        return answers[:top_k] if top_k > 1 else answers[0]
