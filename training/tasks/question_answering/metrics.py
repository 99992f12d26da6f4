"""Evaluation of question answering: exact match, F1, and the threshold of "no answer".

The metrics follow SQuAD's official scripts. The scripts differ for answers without words, such as
".". The v1.1 script gives these answers an F1 of 0. The v2.0 script treats them as "no answer".
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

from pydantic import ValidationError

from albert_serve.api.schemas import (
    QuestionAnsweringParameters,
    QuestionContext,
)
from albert_serve.api.wire import validate
from albert_serve.errors import InvalidInputError
from albert_serve.tasks.base import Logits, Runner
from albert_serve.tasks.question_answering.spans import NUM_BEST
from albert_serve.tasks.question_answering.task import PreparedQuestion, QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
from training.errors import EvaluationError
from training.model.heads import AlbertForTasks
from training.tasks.engine import EngineItem, TorchEngine, predict
from training.tasks.question_answering.files import Question

# The limits of run_squad in the original code, in tokens.
MAX_ANSWER_LENGTH: Final = 30
_MAX_QUESTION_LENGTH: Final = 64
BEST_F1_THRESHOLD: Final = "question_answering_best_f1_threshold"

# With a smaller fraction of answered or of unanswered questions, a threshold is useless.
_MIN_ANSWERED_FRACTION: Final = 0.01
_SHOWN_IDS: Final = 5

_Version: TypeAlias = Literal["1.1", "2.0"]
_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


def question_parameters(
    max_positions: int,
    *,
    may_be_empty: bool,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    length: int | None = None,
) -> QuestionAnsweringParameters:
    """Return the parameters of requests to the service for these limits.

    Args:
        max_positions: number of positions of the model.
        may_be_empty: whether "no answer" is allowed.
        max_answer_length: maximum number of tokens in an answer.
        length: maximum number of tokens in a question with a window of its context, or None for the
            service's default.
    """
    parameters = {
        "handle_impossible_answer": may_be_empty,
        "max_answer_len": max_answer_length,
        "max_question_len": min(_MAX_QUESTION_LENGTH, (length or max_positions) // 2),
        "max_seq_len": length,
    }
    try:
        return validate(QuestionAnsweringParameters, parameters)
    except InvalidInputError as error:
        raise EvaluationError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredQuestion:
    """A model's answers to a question.

    Attributes:
        question: question with its correct answers.
        n_best: answers with their probabilities, best first, without "no answer".
        no_answer: probability of "no answer".
        null_score: logit of "no answer" minus the logit of the best answer.
    """

    question: Question
    n_best: list[tuple[str, float]]
    no_answer: float
    null_score: float

    @property
    def best(self) -> str:
        """The best answer, without regard to "no answer"."""
        return self.n_best[0][0] if self.n_best else ""


def answer_questions(
    model: AlbertForTasks,
    tokenizer: AlbertTokenizer,
    questions: Sequence[Question],
    *,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    length: int | None = None,
) -> list[AnsweredQuestion]:
    """Answer questions as the service would."""
    max_positions = model.config.max_positions
    task = QuestionAnswering(tokenizer=tokenizer, max_positions=max_positions)
    parameters = question_parameters(
        max_positions, may_be_empty=True, max_answer_length=max_answer_length, length=length
    )
    return answer_items(TorchEngine(model), prepare_questions(task, questions, parameters))


def prepare_questions(
    task: QuestionAnswering,
    questions: Sequence[Question],
    parameters: QuestionAnsweringParameters,
) -> list[EngineItem]:
    """Return the model inputs of each question, as the service computes them."""
    errors = _repeated_ids(questions)
    items: list[EngineItem] = []
    for question in questions:
        try:
            item = QuestionContext(question=question.question, context=question.context)
            prepared = task.prepare_question(item, parameters)
        except (InvalidInputError, ValidationError):
            location = question.location or f"question {question.id}"
            errors.append(f"{location}: The question is empty, or too long for the model.")
        else:
            decode = partial(_decode, prepared)
            items.append(EngineItem(inputs=prepared.inputs, decode=decode, targets=[question]))
    if errors:
        raise EvaluationError(*errors)
    return items


def answer_items(runner: Runner, items: Sequence[EngineItem]) -> list[AnsweredQuestion]:
    """Answer the questions of `prepare_questions`."""
    answers = predict(runner, items, "questions")
    return [
        AnsweredQuestion(
            question=question, n_best=n_best, no_answer=no_answer, null_score=null_score
        )
        for item, (n_best, no_answer, null_score) in zip(items, answers, strict=True)
        for question in item.targets or ()
    ]


def validation_metrics(answers: Sequence[AnsweredQuestion]) -> dict[str, float]:
    """Return exact match and F1 in percent (with the best thresholds for v2.0)."""
    metrics = question_metrics(answers, 0.0)
    return {
        name: metrics.get(f"question_answering_best_{name}", metrics[f"question_answering_{name}"])
        for name in ("exact_match", "f1")
    }


def _repeated_ids(questions: Sequence[Question]) -> list[str]:
    """Return an error if several questions have the same id."""
    counts = Counter(question.id for question in questions)
    repeated = [name for name, count in counts.items() if count > 1]
    if not repeated:
        return []
    shown = ", ".join(repeated[:_SHOWN_IDS])
    return [
        f"Several questions have the same id, for {len(repeated):,} ids: {shown}. Use unique ids."
    ]


def _decode(
    prepared: PreparedQuestion, logits: list[Logits]
) -> list[tuple[list[tuple[str, float]], float, float]]:
    spans = prepared.find(logits)
    scores, no_answer = spans.scores(prepared.threshold)
    n_best = [
        (prepared.text[span.start : span.end], score)
        for span, score in zip(spans.best[:NUM_BEST], scores, strict=False)
    ]
    return [(n_best, no_answer, spans.null_score)]


def question_metrics(answered: Sequence[AnsweredQuestion], threshold: float) -> dict[str, float]:
    """Return exact match and F1 in percent, as SQuAD's official scripts compute them.

    If some questions have no answer, the rules of v2.0 apply. Additional metrics are then for the
    questions with an answer, the questions without one, the questions with an answer if "no answer"
    is not allowed, and the best thresholds.

    Args:
        threshold: null score above which the prediction is "no answer".
    """
    scores = score_answers(answered, threshold)
    metrics = _mean_metrics("", scores)
    if not may_be_empty(answered):
        return metrics
    parts: defaultdict[str, list[SquadScore]] = defaultdict(list)
    for reply, score in zip(answered, scores, strict=True):
        if reply.question.answers:
            parts["has_answer_"].append(score)
            best_score = score_answer(reply.question, reply.best, "2.0")
            parts["has_answer_always_answered_"].append(best_score)
        else:
            parts["no_answer_"].append(score)
    for prefix, part_scores in parts.items():
        metrics |= _mean_metrics(prefix, part_scores)
    return metrics | _best_threshold_metrics(answered)


def score_answers(answered: Sequence[AnsweredQuestion], threshold: float) -> list[SquadScore]:
    """Return exact match and F1 of each answer. Under v1.1, the threshold is ignored."""
    version = version_of([reply.question for reply in answered])
    max_null_score = threshold if version == "2.0" else math.inf
    return [
        score_answer(reply.question, predicted(reply, max_null_score), version)
        for reply in answered
    ]


def may_be_empty(answered: Sequence[AnsweredQuestion]) -> bool:
    """Return whether some of the questions have no answer."""
    return version_of([reply.question for reply in answered]) == "2.0"


def _mean_metrics(prefix: str, scores: Sequence[SquadScore]) -> dict[str, float]:
    mean = mean_score(scores)
    return {
        f"question_answering_{prefix}exact_match": mean.exact,
        f"question_answering_{prefix}f1": mean.f1,
        f"question_answering_{prefix}questions": len(scores),
    }


def _best_threshold_metrics(answered: Sequence[AnsweredQuestion]) -> dict[str, float]:
    metrics = {}
    best_scores = [score_answer(reply.question, reply.best, "2.0") for reply in answered]
    for name, index in (("exact_match", 0), ("f1", 1)):
        best, threshold = find_best_threshold(
            [
                Outcome(
                    score=score[index],
                    is_empty=not reply.best,
                    null_score=reply.null_score,
                    has_answer=bool(reply.question.answers),
                )
                for reply, score in zip(answered, best_scores, strict=True)
            ]
        )
        metrics[f"question_answering_best_{name}"] = best
        metrics[f"question_answering_best_{name}_threshold"] = threshold
    return metrics


def predicted(answer: AnsweredQuestion, threshold: float) -> str:
    """Return the best answer, or "" if the null score exceeds the threshold."""
    return "" if answer.null_score > threshold else answer.best


def describe_threshold(answered: Sequence[AnsweredQuestion], threshold: float) -> str | None:
    """Return a warning if a threshold leaves hardly any question answered, or unanswered."""
    fraction = sum(bool(predicted(reply, threshold)) for reply in answered) / len(answered)
    if _MIN_ANSWERED_FRACTION <= fraction <= 1 - _MIN_ANSWERED_FRACTION:
        return None
    return (
        f"With the threshold of the best F1, {threshold:.4g}, {fraction:.1%} of the questions have "
        "an answer. The model does not recognise which have one, so bundles get no threshold."
    )


class SquadScore(NamedTuple):
    """Exact match and F1: from 0 to 1 for one question, in percent for several."""

    exact: float
    f1: float


def version_of(questions: Sequence[Question]) -> _Version:
    """Return the official script's version: v2.0 if any question has no answer, otherwise v1.1."""
    return "1.1" if all(question.answers for question in questions) else "2.0"


def mean_score(scores: Sequence[SquadScore]) -> SquadScore:
    """Return the mean scores of questions in percent."""
    exact, f1 = (100 * sum(values) / len(scores) for values in zip(*scores, strict=True))
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
    """Return the F1 of the words of two texts, or 1 if both are empty."""
    words, answer_words = normalize(predicted).split(), normalize(answer).split()
    if words == answer_words:
        return 1.0
    num_common = (Counter(words) & Counter(answer_words)).total()
    return 2 * num_common / (len(words) + len(answer_words))


def normalize(text: str) -> str:
    """Lowercase a text, and remove punctuation, articles and repeated white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The score of a predicted answer, and whether the question has an answer.

    Attributes:
        score: exact match or F1 of the predicted answer, from 0 to 1.
        is_empty: whether the predicted answer is empty.
        null_score: score of "no answer", which is predicted if the score exceeds the threshold.
        has_answer: whether the question has an answer.
    """

    score: float
    is_empty: bool
    null_score: float
    has_answer: bool


def find_best_threshold(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Return the best mean score over all thresholds, in percent, and that threshold.

    This is `find_best_thresh` of the official SQuAD 2.0 script, except in two cases. Questions with
    equal null scores are either all answered or all unanswered. If it is best to answer none, the
    threshold is less than all null scores, not 0. The threshold is always finite.
    """
    ordered = sorted(outcomes, key=lambda outcome: outcome.null_score)
    total = best = float(sum(not outcome.has_answer for outcome in ordered))
    finite = (outcome.null_score for outcome in ordered if math.isfinite(outcome.null_score))
    threshold = min(finite, default=0.0) - 1
    for outcome, next_outcome in pairwise([*ordered, None]):
        assert outcome is not None
        total += outcome.score if outcome.has_answer else -float(not outcome.is_empty)
        is_last = next_outcome is None or next_outcome.null_score > outcome.null_score
        if is_last and total > best and math.isfinite(outcome.null_score):
            best, threshold = total, outcome.null_score
    return 100 * best / len(ordered), threshold
