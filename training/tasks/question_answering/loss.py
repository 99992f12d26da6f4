"""Question answering in a run: configuration, data, loss and validation.

Shape legend: C sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from albert_serve.progress import progress
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, LossName, TokenisedExample
from training.data.labelled.rows import collecting, raise_listed
from training.errors import EvaluationError
from training.loop.validation import Validation
from training.losses import LogitsFunction, LossSums, cross_entropy, example_rows
from training.model.heads import AlbertForTasks, Task
from training.tasks.base import TrainingSetup, TrainingTask, check_metric, validation_batches
from training.tasks.engine import HeldOutItems
from training.tasks.question_answering.files import Question, read_located, span_examples
from training.tasks.question_answering.metrics import (
    answer_items,
    prepare_questions,
    question_parameters,
    validation_metrics,
)

TASK: Final[Task] = "question-answering"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionConfig:
    """The configuration of question answering in a run.

    Attributes:
        files: SQuAD files.
        validation: SQuAD files of held-out questions.
        length: maximum number of tokens in a question with a window of its context.
        metric: metric that selects the best checkpoint, or None for F1.
    """

    files: Sequence[Path]
    validation: Sequence[Path]
    length: int
    metric: str | None


def read_spans(config: QuestionConfig, setup: TrainingSetup, batch_size: int) -> TrainingTask:
    """Read and tokenise the questions of the training and validation files."""
    length = min(config.length, setup.architecture.max_positions)
    metric = config.metric or "f1"
    errors: list[str] = []
    examples: Sequence[TokenisedExample] = ()
    validation = None
    with collecting(errors):
        questions, num_repaired = read_located(config.files)
        if num_repaired:
            print(
                f"{num_repaired:,} of {len(questions):,} answers were not at their answer_start. "
                "Corrected the offsets, which were unambiguous."
            )
        questions_with_progress = progress(
            questions, title="tokenising questions", unit="questions"
        )
        examples = _windows(questions_with_progress, setup.tokenizer, length)
    if config.validation:
        check_metric(config.metric, ("f1", "exact_match", "loss"), "questions")
        with collecting(errors, EvaluationError):
            questions, _ = read_located(config.validation)
            validation = _validation(questions, metric, setup, length)
    raise_listed(errors)
    return TrainingTask(
        name=TASK,
        streams=(setup.stream(TASK, examples, batch_size),),
        losses={TASK: partial(span_loss, logits=setup.compiled(_span_logits))},
        validation=validation,
        metric=metric,
    )


def _windows(
    questions: Iterable[Question], tokenizer: AlbertTokenizer, length: int
) -> list[TokenisedExample]:
    return [
        window
        for question in questions
        for window in span_examples(question, tokenizer, length=length)
    ]


def _validation(
    questions: Sequence[Question], metric: str, setup: TrainingSetup, length: int
) -> Validation:
    """Return the validation, which measures either the windows' loss or the service's answers."""
    windows = _windows(questions, setup.tokenizer, length)
    held_out = None
    if metric != "loss":
        max_positions = setup.architecture.max_positions
        task = QuestionAnswering(tokenizer=setup.tokenizer, max_positions=max_positions)
        parameters = question_parameters(max_positions, may_be_empty=True)
        held_out = HeldOutItems(
            task=TASK,
            items=prepare_questions(task, questions, parameters),
            predict=answer_items,
            compute_metrics=validation_metrics,
        )
    return Validation(
        batches=validation_batches(TASK, windows, row_length=setup.row_length),
        tasks=(TASK,),
        held_out=held_out,
    )


def _span_logits(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
    """Return start and end logits (C, S, 2) of each example's tokens, with -inf for padding."""
    logits_T2 = model.logits("question-answering", model(batch.tokens)).flatten(0, 1).float()
    rows_CS, positions_S = example_rows(batch)
    is_outside_CS = positions_S >= batch.sizes[:, None]
    return logits_T2[rows_CS].masked_fill(is_outside_CS[..., None], -torch.inf)


def span_loss(
    model: AlbertForTasks, batch: ExampleBatch, logits: LogitsFunction = _span_logits
) -> dict[LossName, LossSums]:
    """Return the mean of the cross-entropies of start and end positions."""
    logits_CS2, count = logits(model, batch), len(batch.targets)
    start, end = (
        cross_entropy(logits_CS2[..., index], batch.targets[:, index], count) for index in (0, 1)
    )
    # Start and end are halves of one prediction, as in run_squad of the original code.
    loss, right = (start.loss + end.loss) / 2, (start.right + end.right) / 2
    return {"question-answering": LossSums(loss=loss, right=right, count=count)}
