"""Data of question answering, and validation on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from albert_serve.progress import progress
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import TokenisedExample
from training.data.questions import Question, read_located, span_examples
from training.evaluation.questions import HeldOutQuestions, lay_questions, question_parameters
from training.evaluation.torch_engine import EngineItem
from training.evaluation.validation import Validation
from training.finetuning.data import DataContext, check_metric, validation_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionData:
    """The held-out questions of a run.

    Attributes:
        figure: what decides which validation is best: `f1`, `exact_match` or `loss`.
        items: the questions as they are asked; none where the loss decides.
        windows: of the questions, as in training.
    """

    held_out: Sequence[Question]
    items: Sequence[EngineItem]
    figure: str
    windows: Sequence[TokenisedExample]

    def validation(self, *, every: int, row_length: int) -> Validation:
        """Return the validation: by the answers, or by the loss of the windows."""
        return Validation(
            batches=validation_batches("question-answering", self.windows, row_length=row_length),
            every=every,
            tasks=("question-answering",),
            questions=None if self.figure == "loss" else HeldOutQuestions(items=self.items),
        )

    @property
    def chance(self) -> float | None:
        """The figure if no question had an answer."""
        num_empty = sum(not question.answers for question in self.held_out)
        return None if self.figure == "loss" else 100 * num_empty / len(self.held_out)


def build_held_out_questions(context: DataContext) -> QuestionData:
    """Read the questions of `--validation`.

    Raises:
        CorpusError: files cannot be read, or hold what cannot be asked; all of it is listed.
        EvaluationError: as `lay_questions`.
        RunError: `--metric` is none of questions.
    """
    settings, tokenizer = context.settings, context.tokenizer
    max_positions = context.architecture.max_positions
    check_metric(settings.metric, ("f1", "exact_match", "loss"), "questions")
    figure = settings.metric or "f1"
    questions, _ = read_located(settings.validation)
    asked = questions if figure != "loss" else []
    length = settings.window_length(max_positions)
    task = QuestionAnswering(tokenizer=tokenizer, max_positions=max_positions)
    return QuestionData(
        held_out=questions,
        items=lay_questions(task, asked, question_parameters(max_positions, may_be_empty=True)),
        figure=figure,
        windows=[
            window
            for question in questions
            for window in span_examples(question, tokenizer, length=length)
        ],
    )


def question_examples(
    files: Sequence[Path], tokenizer: AlbertTokenizer, *, length: int
) -> list[TokenisedExample]:
    """Read the questions, repair their answers' places, and return their windows.

    Args:
        length: maximum tokens of a question with a window of its context.

    Raises:
        CorpusError: files cannot be read, or answers have no place; all of it is listed.
    """
    questions, num_repaired = read_located(files)
    if num_repaired:
        print(
            f"{num_repaired:,} of {len(questions):,} answers did not stand at their answer_start; "
            "the only place that fits was taken"
        )
    return [
        example
        for question in progress(questions, title="tokenising questions", unit="questions")
        for example in span_examples(question, tokenizer, length=length)
    ]
