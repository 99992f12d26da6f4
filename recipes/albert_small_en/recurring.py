"""Questions without labels: multi-word spans that recur in a passage (Splinter, Ram et al. 2021).

A sentence with such a span is the question, the span replaced by [MASK]; the other sentences of
the passage are the context, in which one occurrence is the answer and any others are replaced,
too. What is learnt is to find the place of a text that the question's words point to.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from albert_serve.tokenizer import SPECIAL_TOKENS
from training.data.questions import Question

MARKER: Final = SPECIAL_TOKENS[4]
STOP_WORDS: Final[frozenset[str]] = ENGLISH_STOP_WORDS
_WORD: Final = re.compile(r"\w+(?:['’-]\w+)*")
# The longest span; it has two words or more.
_SPAN_WORDS: Final = 10
# The fewest words of a question without its span, and the most with it.
_QUESTION_WORDS: Final = (4, 40)
_QUESTIONS_A_PASSAGE: Final = 2


class _Word(NamedTuple):
    """A word of a passage.

    Attributes:
        sentence: number of its sentence.
        begin, end: characters of the sentence.
        key: lower-cased.
        follows: whether nothing but a space stands between it and the word before.
    """

    sentence: int
    begin: int
    end: int
    key: str
    follows: bool


class Occurrence(NamedTuple):
    """A place of a span: characters `begin` to `end` of a sentence of the passage."""

    sentence: int
    begin: int
    end: int


def passages(sentences: Sequence[str], max_words: int) -> Iterator[list[str]]:
    """Yield consecutive sentences of up to `max_words` words together."""
    passage: list[str] = []
    room = max_words
    for sentence in sentences:
        size = len(_WORD.findall(sentence))
        if passage and size > room:
            yield passage
            passage, room = [], max_words
        passage.append(sentence)
        room -= size
    if passage:
        yield passage


def recurring_spans(
    sentences: Sequence[str], stop_words: Collection[str] = STOP_WORDS
) -> list[list[Occurrence]]:
    """Return the occurrences of each span of two words or more that stands in several sentences.

    Longer spans come first, and their places are no others': only the longest are taken. Spans do
    not cross punctuation, and neither begin nor end with a stop word.

    Args:
        stop_words: lower-cased.
    """
    words = list(_words(sentences))
    runs = _runs(words)
    is_taken = [False] * len(words)
    spans: list[list[Occurrence]] = []
    for size in range(_SPAN_WORDS, 1, -1):
        places: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for index, run in enumerate(runs):
            ends = {words[index].key, words[index + size - 1].key} if run >= size else {""}
            if run >= size and ends.isdisjoint(stop_words):
                places[tuple(word.key for word in words[index : index + size])].append(index)
        for indices in places.values():
            free: list[int] = []
            for index in indices:
                is_apart = not free or index >= free[-1] + size
                if is_apart and not any(is_taken[index : index + size]):
                    free.append(index)
            if len({words[index].sentence for index in free}) > 1:
                spans.append([_occurrence(words, index, size) for index in free])
                for index in free:
                    is_taken[index : index + size] = [True] * size
    return spans


def _words(sentences: Sequence[str]) -> Iterator[_Word]:
    for number, sentence in enumerate(sentences):
        end = -1
        for match in _WORD.finditer(sentence):
            follows = sentence[max(end, 0) : match.start()] == " " and end >= 0
            end = match.end()
            yield _Word(number, match.start(), end, match[0].lower(), follows)


def _runs(words: Sequence[_Word]) -> list[int]:
    """Return how many words from each on are joined by pairs that stand in several sentences."""
    sentences: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for one, other in pairwise(words):
        if other.follows:
            sentences[one.key, other.key].add(other.sentence)
    runs = [1] * len(words)
    for index in range(len(words) - 2, -1, -1):
        one, other = words[index : index + 2]
        if other.follows and len(sentences[one.key, other.key]) > 1:
            runs[index] += runs[index + 1]
    return runs


def _occurrence(words: Sequence[_Word], index: int, size: int) -> Occurrence:
    first, last = words[index], words[index + size - 1]
    return Occurrence(first.sentence, first.begin, last.end)


def span_questions(
    sentences: Sequence[str],
    rng: np.random.Generator,
    name: str,
    stop_words: Collection[str] = STOP_WORDS,
) -> Iterator[Question]:
    """Yield questions of a passage, of spans and occurrences drawn at random.

    Args:
        name: of the passage, with which the questions' ids begin.
    """
    spans = recurring_spans(sentences, stop_words)
    num_questions = 0
    for index in rng.permutation(len(spans)).tolist():
        if num_questions == _QUESTIONS_A_PASSAGE:
            return
        span = spans[index]
        fitting = sorted(
            {each.sentence for each in span if _can_ask(sentences, each.sentence, span)}
        )
        if not fitting:
            continue
        asked = fitting[int(rng.integers(len(fitting)))]
        others = [each for each in span if each.sentence != asked]
        answer = others[int(rng.integers(len(others)))]
        yield _question(sentences, span, asked, answer, f"{name}-{num_questions}")
        num_questions += 1


def _can_ask(sentences: Sequence[str], number: int, span: Sequence[Occurrence]) -> bool:
    """Whether a sentence has the span once, enough other words, and is not too long."""
    own = [each for each in span if each.sentence == number]
    text = sentences[number][own[0].begin : own[0].end]
    blanked = _blanked(sentences[number], own)
    least, most = _QUESTION_WORDS
    is_answered = text.lower() in blanked.lower()  # as "John Smith" by "John Smith's"
    num_words = len(_WORD.findall(blanked.replace(MARKER, "")))
    return not is_answered and least <= num_words and len(_WORD.findall(sentences[number])) <= most


def _blanked(sentence: str, occurrences: Sequence[Occurrence]) -> str:
    for each in sorted(occurrences, reverse=True):
        sentence = sentence[: each.begin] + MARKER + sentence[each.end :]
    return sentence


def _question(
    sentences: Sequence[str],
    occurrences: Sequence[Occurrence],
    asked: int,
    answer: Occurrence,
    name: str,
) -> Question:
    texts: list[str] = []
    start = 0
    for number, sentence in enumerate(sentences):
        own = [each for each in occurrences if each.sentence == number]
        if number == asked:
            question = _blanked(sentence, own)
            continue
        if number == answer.sentence:
            before = _blanked(sentence[: answer.begin], [each for each in own if each < answer])
            start = sum(len(text) + 1 for text in texts) + len(before)
            after = [
                each._replace(begin=each.begin - answer.end, end=each.end - answer.end)
                for each in own
                if each > answer
            ]
            rest = _blanked(sentence[answer.end :], after)
            texts.append(before + sentence[answer.begin : answer.end] + rest)
        else:
            texts.append(_blanked(sentence, own))
    text = sentences[answer.sentence][answer.begin : answer.end]
    return Question(
        id=name, question=question, context=" ".join(texts), answers=(text,), start=start
    )


def to_squad(question: Question) -> dict[str, Any]:
    """Return a paragraph of SQuAD's format with one question."""
    answers = [{"text": question.answers[0], "answer_start": question.start}]
    return {
        "context": question.context,
        "qas": [{"id": question.id, "question": question.question, "answers": answers}],
    }
