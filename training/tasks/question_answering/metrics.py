"""Evaluation of question answering: exact match, F1, and the threshold of "no answer".

Scores are those of SQuAD's official scripts. Those of v1.1 and of v2.0 differ where an answer has
no word (such as "."): in v1.1 it is an answer like any other, and has no F1; in v2.0 it is none,
and two answers without words are equal.
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

# The limits of the original's run_squad, in tokens.
MAX_ANSWER_LENGTH: Final = 30
_MAX_QUESTION_LENGTH: Final = 64
BEST_F1_THRESHOLD: Final = "question_answering_best_f1_threshold"

# The least share of the questions that a threshold gives an answer, and gives none.
_TELLING: Final = 0.01
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
    """Return the parameters of the requests by which questions are asked.

    Args:
        max_positions: of the model.
        may_be_empty: whether no answer is one.
        max_answer_length: tokens of the longest answer.
        length: maximum tokens of a question with a window of its context; None for the service's.
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
        n_best: the best answers with their probabilities, the best first; "no answer" is not among
            them.
        no_answer: the probability of "no answer".
        null_score: the logit of "no answer" minus that of the best answer.
    """

    question: Question
    n_best: list[tuple[str, float]]
    no_answer: float
    null_score: float

    @property
    def best(self) -> str:
        """The best answer that is not "no answer"."""
        return self.n_best[0][0] if self.n_best else ""


def answer_questions(
    model: AlbertForTasks,
    tokenizer: AlbertTokenizer,
    questions: Sequence[Question],
    *,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    length: int | None = None,
) -> list[AnsweredQuestion]:
    """Answer questions as the service does."""
    max_positions = model.config.max_positions
    task = QuestionAnswering(tokenizer=tokenizer, max_positions=max_positions)
    parameters = question_parameters(
        max_positions, may_be_empty=True, max_answer_length=max_answer_length, length=length
    )
    return answer_items(TorchEngine(model), lay_questions(task, questions, parameters))


def lay_questions(
    task: QuestionAnswering,
    questions: Sequence[Question],
    parameters: QuestionAnsweringParameters,
) -> list[EngineItem]:
    """Return the inputs of each question, as the service lays them."""
    errors = _repeated_ids(questions)
    items: list[EngineItem] = []
    for question in questions:
        try:
            item = QuestionContext(question=question.question, context=question.context)
            asked = task.prepare_question(item, parameters)
        except (InvalidInputError, ValidationError):
            place = question.place or f"question {question.id}"
            errors.append(f"{place}: it is empty, or too long for the model")
        else:
            read = partial(_read, asked)
            items.append(EngineItem(inputs=asked.inputs, read=read, rights=[question]))
    if errors:
        raise EvaluationError(*errors)
    return items


def answer_items(runner: Runner, items: Sequence[EngineItem]) -> list[AnsweredQuestion]:
    """Answer the questions of `lay_questions`."""
    answers = predict(runner, items, "questions")
    return [
        AnsweredQuestion(
            question=question, n_best=n_best, no_answer=no_answer, null_score=null_score
        )
        for item, (n_best, no_answer, null_score) in zip(items, answers, strict=True)
        for question in item.rights or ()
    ]


def validation_figures(answered: Sequence[AnsweredQuestion]) -> dict[str, float]:
    """Return exact match and F1 in percent; of v2.0 at their best thresholds."""
    figures = question_figures(answered, 0.0)
    return {
        name: figures.get(f"question_answering_best_{name}", figures[f"question_answering_{name}"])
        for name in ("exact_match", "f1")
    }


def _repeated_ids(questions: Sequence[Question]) -> list[str]:
    """Return an error for ids that several questions have, if there are some."""
    counts = Counter(question.id for question in questions)
    repeated = [name for name, count in counts.items() if count > 1]
    if not repeated:
        return []
    shown = ", ".join(repeated[:_SHOWN_IDS])
    return [f"{len(repeated):,} ids stand for several questions: {shown}; each needs its own"]


def _read(
    asked: PreparedQuestion, logits: list[Logits]
) -> list[tuple[list[tuple[str, float]], float, float]]:
    spans = asked.find(logits)
    scores, no_answer = spans.scores(asked.threshold)
    n_best = [
        (asked.text[span.start : span.end], score)
        for span, score in zip(spans.best[:NUM_BEST], scores, strict=False)
    ]
    return [(n_best, no_answer, spans.null_score)]


def question_figures(answered: Sequence[AnsweredQuestion], threshold: float) -> dict[str, float]:
    """Return exact match and F1 in percent, by the rules of SQuAD's official scripts.

    Where some questions have no answer, the rules are those of v2.0, "no answer" may be chosen, and
    there are the figures of the questions with and without an answer, of those with an answer if
    "no answer" may not be chosen, and of the best thresholds.

    Args:
        threshold: the null score over which the answer is "no answer".
    """
    scores = score_answers(answered, threshold)
    if not may_be_empty(answered):
        return _named("", scores)
    figures = _named("", scores)
    parts: defaultdict[str, list[SquadScore]] = defaultdict(list)
    for reply, score in zip(answered, scores, strict=True):
        if reply.question.answers:
            parts["has_answer_"].append(score)
            forced = score_answer(reply.question, reply.best, "2.0")
            parts["has_answer_always_answered_"].append(forced)
        else:
            parts["no_answer_"].append(score)
    for name, some in parts.items():
        figures |= _named(name, some)
    return figures | _best_figures(answered)


def score_answers(answered: Sequence[AnsweredQuestion], threshold: float) -> list[SquadScore]:
    """Return exact match and F1 of each answer; where all questions have one, of the best."""
    version = version_of([reply.question for reply in answered])
    limit = threshold if version == "2.0" else math.inf
    return [score_answer(reply.question, predicted(reply, limit), version) for reply in answered]


def may_be_empty(answered: Sequence[AnsweredQuestion]) -> bool:
    """Whether some of the questions have no answer."""
    return version_of([reply.question for reply in answered]) == "2.0"


def _named(part: str, scores: Sequence[SquadScore]) -> dict[str, float]:
    mean = mean_score(scores)
    return {
        f"question_answering_{part}exact_match": mean.exact,
        f"question_answering_{part}f1": mean.f1,
        f"question_answering_{part}questions": len(scores),
    }


def _best_figures(answered: Sequence[AnsweredQuestion]) -> dict[str, float]:
    figures = {}
    raw = [score_answer(reply.question, reply.best, "2.0") for reply in answered]
    for name, side in (("exact_match", 0), ("f1", 1)):
        best, threshold = find_best_threshold(
            [
                Outcome(
                    score=score[side],
                    is_empty=not reply.best,
                    null_score=reply.null_score,
                    has_answer=bool(reply.question.answers),
                )
                for reply, score in zip(answered, raw, strict=True)
            ]
        )
        figures[f"question_answering_best_{name}"] = best
        figures[f"question_answering_best_{name}_threshold"] = threshold
    return figures


def predicted(answered: AnsweredQuestion, threshold: float) -> str:
    """Return the answer, empty if the null score is over the threshold."""
    return "" if answered.null_score > threshold else answered.best


def describe_threshold(answered: Sequence[AnsweredQuestion], threshold: float) -> str | None:
    """Return a warning if a threshold gives hardly a question an answer, or nearly all."""
    share = sum(bool(predicted(reply, threshold)) for reply in answered) / len(answered)
    if _TELLING <= share <= 1 - _TELLING:
        return None
    return (
        f"the threshold of the best F1, {threshold:.4g}, gives {share:.1%} of the questions an "
        "answer: the model does not tell which have one, and a bundle gets no threshold"
    )


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
