"""Answers identical to those of `transformers` 4.57.6's question-answering pipeline.

For comparisons with it, and for thresholds tuned on its scores. Each window is normalised by
itself; the best spans of every window are pooled; spans whose texts are equal up to case are one
answer, at the place of the first, whose score is the sum and may exceed 1; words end at white
space; a single answer has no list around it, whatever `top_k` is.
Source: `pipelines/question_answering.py` of that version.

Shape legend: S positions of a window's sequence, C candidate spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import Answer, QuestionAnsweringAnswer, QuestionAnsweringParameters
from albert_serve.tasks.base import EncoderInput, Logits
from albert_serve.tasks.probability import finite
from albert_serve.tasks.question_answering.windows import Windows
from albert_serve.tokenizer import AlbertTokenizer

# The pipeline's logit for positions that are not allowed.
_NO_LOGIT: Final = -10000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RawTokens:
    """The tokens of a text, with the offsets of the `tokenizers` library.

    Attributes:
        offsets: the characters of each token; unlike `Encoding`'s, with the space before a word.
        words: the number of each token's word; words are separated by white space.
    """

    offsets: list[tuple[int, int]]
    words: list[int | None]

    @classmethod
    def read(cls, tokenizer: AlbertTokenizer, text: str) -> RawTokens:
        """Return the tokens of a text that `encode_plain` has taken, the same as its."""
        encoded = tokenizer.encode_raw(text)
        ids, offsets = encoded.ids, encoded.offsets
        if tokenizer.mask_id in ids:
            offsets = [
                (_skip_space(text, start), end) if token == tokenizer.mask_id else (start, end)
                for token, (start, end) in zip(ids, offsets, strict=True)
            ]
        return cls(offsets=offsets, words=encoded.word_ids)

    def slice(self, start: int, stop: int) -> RawTokens:
        """Return the tokens from `start` to before `stop`."""
        return RawTokens(offsets=self.offsets[start:stop], words=self.words[start:stop])

    def find_words(self) -> dict[int, tuple[int, int]]:
        """Return the characters of each word, by its number."""
        spans: dict[int, tuple[int, int]] = {}
        for word, (start, end) in zip(self.words, self.offsets, strict=True):
            if word is not None:
                spans[word] = (spans[word][0] if word in spans else start, end)
        return spans


def _skip_space(text: str, start: int) -> int:
    # In 4.57.6 the ALBERT tokenizer's [MASK] included the space before it.
    while start > 0 and text[start - 1].isspace():
        start -= 1
    return start


def num_candidates(parameters: QuestionAnsweringParameters) -> int:
    """Return the number of candidates a window; more than `top_k` if words may merge them."""
    return parameters.top_k * 2 + 10 if parameters.align_to_words else parameters.top_k


@dataclass(frozen=True, kw_only=True, slots=True)
class CompatDecoder:
    """Finds the answers of one question.

    Attributes:
        inputs: the windows' sequences.
        question: the question's tokens in the sequences.
        context: all tokens of the context.
        text: the context.
        cls_id: id of [CLS], which the pipeline allows as an answer at any position.
    """

    inputs: Sequence[EncoderInput]
    windows: Windows
    question: RawTokens
    context: RawTokens
    text: str
    parameters: QuestionAnsweringParameters
    cls_id: int

    def finish(self, logits: Sequence[Logits]) -> QuestionAnsweringAnswer:
        """Return the answers, best first.

        Args:
            logits: (S, 2) for each window, in order.
        """
        # By lower-case text, in order of appearance.
        by_text: dict[str, Answer] = {}
        min_no_answer = np.inf
        for item, bounds, logits_S2 in zip(self.inputs, self.windows.ranges, logits, strict=True):
            window = self._window(item, bounds)
            scores = window.score(logits_S2)
            min_no_answer = min(min_no_answer, scores.no_answer)
            for start, end, score in scores.best(num_candidates(self.parameters), self.parameters):
                self._add(by_text, window.characters(start, end, self.parameters), score)
        answers = list(by_text.values())
        if self.parameters.handle_impossible_answer:
            answers.append(Answer(answer="", score=min_no_answer, start=0, end=0))
        answers = sorted(answers, key=lambda answer: -answer.score)[: self.parameters.top_k]
        return answers[0] if len(answers) == 1 else answers

    def _window(self, item: EncoderInput, bounds: tuple[int, int]) -> _Window:
        nowhere = RawTokens(offsets=[(0, 0)], words=[None])
        context = self.context.slice(*bounds)
        parts = [nowhere, self.question, nowhere, context, nowhere]
        allowed = np.array(item.ids) == self.cls_id
        allowed[self.windows.num_before : -1] = True
        return _Window(
            tokens=RawTokens(
                offsets=[offset for part in parts for offset in part.offsets],
                words=[word for part in parts for word in part.words],
            ),
            words=context.find_words(),
            allowed=allowed,
        )

    def _add(self, by_text: dict[str, Answer], span: tuple[int, int], score: float) -> None:
        start, end = span
        text = self.text[start:end]
        known = by_text.get(text.lower())
        if known is None:
            by_text[text.lower()] = Answer(answer=text, score=score, start=start, end=end)
        else:
            by_text[text.lower()] = known.model_copy(update={"score": known.score + score})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """One sequence: [CLS] question [SEP] a part of the context [SEP].

    Attributes:
        words: the characters of each word of the context, within the window.
        allowed: (S,), the positions where an answer may begin and end.
    """

    tokens: RawTokens
    words: dict[int, tuple[int, int]]
    allowed: NDArray[np.bool_]

    def score(self, logits_S2: Logits) -> _Scores:
        finite(logits_S2)
        start_S, end_S = (self._shares(logits_S) for logits_S in logits_S2.T)
        no_answer = float(start_S[0] * end_S[0])
        start_S[0] = end_S[0] = 0.0
        return _Scores(starts=start_S, ends=end_S, allowed=self.allowed, no_answer=no_answer)

    def _shares(self, logits_S: Logits) -> NDArray[np.float32]:
        # In single precision like the pipeline, so that ties are the same.
        seen_S = np.where(self.allowed, logits_S, np.float32(_NO_LOGIT))
        powers_S = np.exp(seen_S - seen_S.max())
        shares: NDArray[np.float32] = powers_S / powers_S.sum()
        return shares

    def characters(
        self, start: int, end: int, parameters: QuestionAnsweringParameters
    ) -> tuple[int, int]:
        """Return the characters from one token to another, widened to words if they are known."""
        offsets = self.tokens.offsets
        if parameters.align_to_words:
            first, last = self._word(start), self._word(end)
            if first is not None and last is not None:
                return first[0], last[1]
        return offsets[start][0], offsets[end][1]

    def _word(self, place: int) -> tuple[int, int] | None:
        # As in the pipeline, a token of the question has the context's word of the same number.
        word = self.tokens.words[place]
        return None if word is None else self.words.get(word)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """The probabilities of an answer's start and end at each position, and of no answer.

    Attributes:
        no_answer: of the window; the pipeline takes the minimum over windows.
    """

    starts: NDArray[np.float32]
    ends: NDArray[np.float32]
    allowed: NDArray[np.bool_]
    no_answer: float

    def best(
        self, num_candidates: int, parameters: QuestionAnsweringParameters
    ) -> list[tuple[int, int, float]]:
        """Return the likeliest spans as (first token, last token, score).

        These are exactly the pipeline's steps, because they decide ties.
        """
        scores_SS = self.starts[:, None] * self.ends[None, :]
        scores_SS = np.tril(np.triu(scores_SS), parameters.max_answer_len - 1)
        flat = scores_SS.flatten()
        if num_candidates == 1:
            chosen_C = np.array([np.argmax(flat)])
        elif len(flat) < num_candidates:
            chosen_C = np.argsort(-flat)
        else:
            unsorted_C = np.argpartition(-flat, num_candidates)[:num_candidates]
            chosen_C = unsorted_C[np.argsort(-flat[unsorted_C])]
        return [
            (int(start), int(end), float(scores_SS[start, end]))
            for start, end in zip(*np.unravel_index(chosen_C, scores_SS.shape), strict=True)
            if self.allowed[start] and self.allowed[end]
        ]
