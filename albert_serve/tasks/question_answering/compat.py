"""Answers as the question-answering pipeline of `transformers` 4.57.6 gives them.

For those who compare with it, or have thresholds tuned on its scores. Each window is normalised by
itself; the best spans of every window are pooled; those whose texts are equal but for their case
are one answer, at the place of the first, whose score is the sum and may exceed 1; words end at
white space; one answer alone has no list around it, whatever `top_k` is.
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

# What the pipeline puts in place of the logits of what is no answer.
_NO_LOGIT: Final = -10000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RawTokens:
    """The tokens of a text as the `tokenizers` library itself places them.

    Attributes:
        offsets: the characters of each; unlike those of `Encoding`, with a space before a word.
        words: for each the number of the word, between white space, that it is of.
    """

    offsets: list[tuple[int, int]]
    words: list[int | None]

    @classmethod
    def read(cls, tokenizer: AlbertTokenizer, text: str) -> RawTokens:
        """The tokens of `text`, the same as `encode_plain` has."""
        ids = tokenizer.encode_plain(text).ids
        placed = tokenizer.locate(text)
        offsets = [
            (_skip_space(text, start), end) if token == tokenizer.mask_id else (start, end)
            for token, ((start, end), _) in zip(ids, placed, strict=True)
        ]
        return cls(offsets=offsets, words=[word for _, word in placed])

    def slice(self, start: int, stop: int) -> RawTokens:
        """The tokens from `start` to before `stop`."""
        return RawTokens(offsets=self.offsets[start:stop], words=self.words[start:stop])

    def find_words(self) -> dict[int, tuple[int, int]]:
        """The characters of each word, by its number."""
        found: dict[int, tuple[int, int]] = {}
        for word, (start, end) in zip(self.words, self.offsets, strict=True):
            if word is not None:
                found[word] = (found[word][0] if word in found else start, end)
        return found


def _skip_space(text: str, start: int) -> int:
    # The class of tokenizers for ALBERT in 4.57.6 gave the space before a [MASK] to it.
    while start > 0 and text[start - 1].isspace():
        start -= 1
    return start


def num_candidates(parameters: QuestionAnsweringParameters) -> int:
    """Of each window; more than asked for, where words may make several of them one."""
    return parameters.top_k * 2 + 10 if parameters.align_to_words else parameters.top_k


@dataclass(frozen=True, kw_only=True, slots=True)
class CompatDecoder:
    """Finds the answers of one question.

    Attributes:
        inputs: the windows' sequences.
        question: tokens of the question, as far as the sequences hold it.
        context: all tokens of the context.
        text: the context.
        cls_id: id of [CLS], which the pipeline takes for a possible answer wherever it stands.
    """

    inputs: Sequence[EncoderInput]
    windows: Windows
    question: RawTokens
    context: RawTokens
    text: str
    parameters: QuestionAnsweringParameters
    cls_id: int

    def finish(self, logits: Sequence[Logits]) -> QuestionAnsweringAnswer:
        """The answers, best first.

        Args:
            logits: (S, 2) for each window, in order.
        """
        # By their texts in lower case, in the order in which they came up.
        found: dict[str, Answer] = {}
        least_no_answer = np.inf
        for given, bounds, logits_S2 in zip(self.inputs, self.windows.ranges, logits, strict=True):
            window = self._window(given, bounds)
            scores = window.score(logits_S2)
            least_no_answer = min(least_no_answer, scores.no_answer)
            for start, end, score in scores.best(num_candidates(self.parameters), self.parameters):
                self._add(found, window.characters(start, end, self.parameters), score)
        answers = list(found.values())
        if self.parameters.handle_impossible_answer:
            answers.append(Answer(answer="", score=least_no_answer, start=0, end=0))
        answers = sorted(answers, key=lambda answer: -answer.score)[: self.parameters.top_k]
        return answers[0] if len(answers) == 1 else answers

    def _window(self, given: EncoderInput, bounds: tuple[int, int]) -> _Window:
        nowhere = RawTokens(offsets=[(0, 0)], words=[None])
        context = self.context.slice(*bounds)
        parts = [nowhere, self.question, nowhere, context, nowhere]
        allowed = np.array(given.ids) == self.cls_id
        allowed[self.windows.num_before : -1] = True
        return _Window(
            tokens=RawTokens(
                offsets=[offset for part in parts for offset in part.offsets],
                words=[word for part in parts for word in part.words],
            ),
            words=context.find_words(),
            allowed=allowed,
        )

    def _add(self, found: dict[str, Answer], place: tuple[int, int], score: float) -> None:
        start, end = place
        text = self.text[start:end]
        known = found.get(text.lower())
        if known is None:
            found[text.lower()] = Answer(answer=text, score=score, start=start, end=end)
        else:
            found[text.lower()] = known.model_copy(update={"score": known.score + score})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """One sequence: [CLS] question [SEP] a part of the context [SEP].

    Attributes:
        words: the characters of each word of the context, as far as it is in the window.
        allowed: (S,), where an answer may begin and end.
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
        # In single precision, as there, so that what is equal there is equal here.
        seen_S = np.where(self.allowed, logits_S, np.float32(_NO_LOGIT))
        powers_S = np.exp(seen_S - seen_S.max())
        shares: NDArray[np.float32] = powers_S / powers_S.sum()
        return shares

    def characters(
        self, start: int, end: int, parameters: QuestionAnsweringParameters
    ) -> tuple[int, int]:
        """The characters from one token to another one; of their words, where they are known."""
        offsets = self.tokens.offsets
        if parameters.align_to_words:
            first, last = self._word(start), self._word(end)
            if first is not None and last is not None:
                return first[0], last[1]
        return offsets[start][0], offsets[end][1]

    def _word(self, place: int) -> tuple[int, int] | None:
        # For a token of the question it is the context's word of that number, as there.
        word = self.tokens.words[place]
        return None if word is None else self.words.get(word)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """How probable it is that an answer begins and ends at each place, and that there is none.

    Attributes:
        no_answer: of the window, for the pipeline takes that of the window that doubts it most.
    """

    starts: NDArray[np.float32]
    ends: NDArray[np.float32]
    allowed: NDArray[np.bool_]
    no_answer: float

    def best(
        self, num_candidates: int, parameters: QuestionAnsweringParameters
    ) -> list[tuple[int, int, float]]:
        """The likeliest spans as (first token, last token, score).

        These are the pipeline's very steps: which of equals it chooses depends on them.
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
