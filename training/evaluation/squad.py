"""Exact match and F1 of answers, by the rules of SQuAD's official evaluation scripts.

Those of v1.1 and of v2.0 differ where an answer has no word (such as "."): in v1.1 it is an answer
like any other, and has no F1; in v2.0 it is none, and two answers without words are equal.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

from training.data.questions import Question

_Version: TypeAlias = Literal["1.1", "2.0"]

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


class SquadScore(NamedTuple):
    """Exact match and F1, of one question from 0 to 1, of several in percent."""

    exact: float
    f1: float


def version_of(questions: Sequence[Question]) -> _Version:
    """Return the version of the script: v2.0 if any question has no answer."""
    return "1.1" if all(question.answers for question in questions) else "2.0"


def mean_score(scores: Sequence[SquadScore]) -> SquadScore:
    """Return the mean of the scores of one or more questions, in percent."""
    exact, f1 = (100 * sum(figures) / len(scores) for figures in zip(*scores, strict=True))
    return SquadScore(exact, f1)


def score_answer(question: Question, predicted: str, version: _Version) -> SquadScore:
    """Return exact match and F1 of one prediction."""
    answers: Sequence[str] = question.answers
    if version == "2.0":
        answers = [answer for answer in answers if normalize(answer)] or [""]
    exact = max(normalize(predicted) == normalize(answer) for answer in answers)
    has_f1 = version == "2.0" or normalize(predicted)
    return SquadScore(
        exact, max(_token_f1(predicted, answer) for answer in answers) if has_f1 else 0.0
    )


def _token_f1(predicted: str, answer: str) -> float:
    """Return the F1 of the words of two texts; 1 if both are empty."""
    words, right = normalize(predicted).split(), normalize(answer).split()
    if not words or not right:
        return float(words == right)
    num_common = (Counter(words) & Counter(right)).total()
    return 2 * num_common / (len(words) + len(right))


def normalize(text: str) -> str:
    """Lower a text's case, and remove punctuation, articles and repeated white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The score of a question's answer, and whether it has one.

    Attributes:
        score: exact match or F1 of the answer, from 0 to 1.
        is_empty: whether the answer is empty.
        null_score: of "no answer"; it is chosen where this is over a threshold.
        has_answer: whether "no answer" is wrong.
    """

    score: float
    is_empty: bool
    null_score: float
    has_answer: bool


def find_best_threshold(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Return the best mean score over all thresholds, in percent, and that threshold.

    `find_best_thresh` of the official script of v2.0, but for two cases: of questions with equal
    null scores, either all are answered or none; and if it is best to answer none, the threshold is
    below all null scores, where the script has 0. It is finite, where null scores may be infinite.
    """
    ordered = sorted(outcomes, key=lambda outcome: outcome.null_score)
    total = best = float(sum(not outcome.has_answer for outcome in ordered))
    finite = (question.null_score for question in ordered if math.isfinite(question.null_score))
    threshold = min(finite, default=0.0) - 1
    for outcome, after in pairwise([*ordered, None]):
        assert outcome is not None
        total += outcome.score if outcome.has_answer else -float(not outcome.is_empty)
        is_last = after is None or after.null_score > outcome.null_score
        if is_last and total > best and math.isfinite(outcome.null_score):
            best, threshold = total, outcome.null_score
    return 100 * best / len(ordered), threshold
