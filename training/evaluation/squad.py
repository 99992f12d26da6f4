"""Exact match and F1 of answers, by the rules of SQuAD's official evaluation script."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from training.data.questions import Question

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


def evaluate_answers(
    questions: Sequence[Question], predictions: Mapping[str, str]
) -> tuple[float, float]:
    """Return exact match and F1 in percent, each the maximum over a question's answers.

    Without an answer, an empty prediction is right. A missing prediction is wrong.
    """
    exact = f1 = 0.0
    for question in questions:
        predicted = predictions.get(question.id)
        if predicted is not None:
            answers = [a for a in question.answers if normalize(a)] or [""]
            exact += max(normalize(predicted) == normalize(answer) for answer in answers)
            f1 += max(token_f1(predicted, answer) for answer in answers)
    return 100 * exact / len(questions), 100 * f1 / len(questions)


def token_f1(predicted: str, answer: str) -> float:
    """Return the F1 of the words of two texts; 1 if both are empty."""
    words, right = normalize(predicted).split(), normalize(answer).split()
    if not words or not right:
        return float(words == right)
    num_common = (Counter(words) & Counter(right)).total()
    return 2 * num_common / (len(words) + len(right))


def normalize(text: str) -> str:
    """Lower a text's case, and remove punctuation, articles and repeated white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
