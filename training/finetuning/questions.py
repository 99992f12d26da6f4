"""Question answering in a finetuning run: its data, its loss, and validation on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

from albert_serve.progress import progress
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import TokenisedExample
from training.data.labelled.errors import collecting, raise_listed
from training.data.questions import Question, read_located, span_examples
from training.data.streams import TaskStream, example_stream
from training.errors import EvaluationError
from training.evaluation.questions import HeldOutQuestions, lay_questions, question_parameters
from training.evaluation.torch_engine import EngineItem
from training.evaluation.validation import Validation
from training.finetuning.config import FinetuneConfig
from training.finetuning.data import (
    check_metric,
    division_of,
    loss_function,
    validation_batches,
)
from training.finetuning.start import Start
from training.loop.distributed import World
from training.losses import LossFunction
from training.model.heads import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Question answering in a run.

    Attributes:
        losses: the loss function, by the name of the stream's micro-batches.
        held_out: questions of validation, where no classifier is validated.
        items: the held-out questions as they are asked; none where the loss decides.
        windows: of the held-out questions, as in training.
        figure: what decides which validation is best: `f1`, `exact_match` or `loss`.
    """

    name: ClassVar[Task] = "question-answering"
    streams: Sequence[TaskStream]
    losses: Mapping[str, LossFunction]
    held_out: Sequence[Question] = ()
    items: Sequence[EngineItem] = ()
    windows: Sequence[TokenisedExample] = ()
    figure: str = "f1"

    @classmethod
    def read(cls, config: FinetuneConfig, start: Start, world: World, batch_size: int) -> Self:
        """Read the questions of training and, if no classifier is validated, of validation.

        Raises:
            CorpusError: files cannot be read, or hold what cannot be asked; all of it is listed.
            EvaluationError: as `lay_questions`.
            RunError: `--metric` is none of questions.
        """
        length = config.window_length(start.architecture.max_positions)
        errors: list[str] = []
        held_out: dict[str, Any] = {}
        examples: Sequence[TokenisedExample] = ()
        with collecting(errors):
            examples = question_examples(config.question_answering, start.tokenizer, length=length)
        if config.validates_questions:
            with collecting(errors, EvaluationError):
                held_out = _read_held_out(config, start)
        raise_listed(errors)
        stream = example_stream(
            cls.name,
            examples,
            start.architecture,
            batch_size=batch_size,
            seed=config.seed,
            division=division_of(config, world),
        )
        losses = {cls.name: loss_function(cls.name, start)}
        return cls(streams=(stream,), losses=losses, **held_out)

    def validation(self, *, every: int, row_length: int) -> Validation:
        """Return the validation: by the answers, or by the loss of the windows."""
        return Validation(
            batches=validation_batches(self.name, self.windows, row_length=row_length),
            every=every,
            tasks=(self.name,),
            held_out=None if self.figure == "loss" else HeldOutQuestions(items=self.items),
        )


def _read_held_out(config: FinetuneConfig, start: Start) -> dict[str, Any]:
    """Return the fields of `Questions` that the questions of `--validation` fill."""
    max_positions = start.architecture.max_positions
    check_metric(config.metric, ("f1", "exact_match", "loss"), "questions")
    figure = config.metric or "f1"
    questions, _ = read_located(config.validation)
    task = QuestionAnswering(tokenizer=start.tokenizer, max_positions=max_positions)
    parameters = question_parameters(max_positions, may_be_empty=True)
    length = config.window_length(max_positions)
    windows = (span_examples(question, start.tokenizer, length=length) for question in questions)
    return {
        "held_out": questions,
        "items": lay_questions(task, questions if figure != "loss" else [], parameters),
        "figure": figure,
        "windows": list(chain.from_iterable(windows)),
    }


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
