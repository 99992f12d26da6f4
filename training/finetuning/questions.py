"""Question answering: its data, validation on it, and the loss of a start-conditioned head.

Shape legend: C windows, S positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from albert_serve.bundle.weights import QuestionHead, question_head_of
from albert_serve.progress import progress
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, LossName, TokenisedExample
from training.data.questions import Question, read_located, span_examples
from training.evaluation.questions import HeldOutQuestions, lay_questions, question_parameters
from training.evaluation.torch_engine import EngineItem
from training.evaluation.validation import Validation
from training.finetuning.data import DataContext, check_metric, validation_batches
from training.losses import (
    LogitsFunction,
    LossFunction,
    LossSums,
    compile_logits,
    example_rows,
    span_loss,
)
from training.model.heads import AlbertForTasks, Task
from training.model.start_conditioned import StartConditionedHead


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


def build_held_out_questions(context: DataContext, head: QuestionHead) -> QuestionData:
    """Read the questions of `--validation`, which a head is to answer.

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
    task = QuestionAnswering(tokenizer=tokenizer, max_positions=max_positions, head=head)
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


def choose_head(asked: QuestionHead | None, stored: Mapping[Task, int]) -> QuestionHead:
    """Return the head that questions are trained with: by default the checkpoint's own.

    Args:
        stored: heads of the checkpoint.
    """
    num_outputs = stored.get("question-answering", 0)
    return asked or question_head_of("question-answering", num_outputs) or "independent"


def _conditioned_logits(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
    """Return the logits (C, S, 3) of a start-conditioned head: start, end, and answerability.

    The end is that of the true start. Both are -inf where no answer can be: everywhere but in the
    context and at [CLS]. Answerability is the same at all positions.
    """
    head = model.heads["question-answering"]
    assert isinstance(head, StartConditionedHead)
    rows_CS, places_S = example_rows(batch)
    hidden_CSH = model(batch.tokens).flatten(0, 1)[rows_CS]
    # The context is the second segment without the [SEP] that ends it.
    is_context_CS = (batch.tokens.types.flatten()[rows_CS] == 1) & (
        places_S < batch.sizes[:, None] - 1
    )
    is_masked_CS = ~(is_context_CS | (places_S == 0))
    every_C = torch.arange(len(rows_CS), device=rows_CS.device)
    start_CS = head.start_logits(hidden_CSH).float().masked_fill(is_masked_CS, -torch.inf)
    end_CS = head.end_logits(hidden_CSH, hidden_CSH[every_C, batch.targets[:, 0]]).float()
    end_CS = end_CS.masked_fill(is_masked_CS, -torch.inf)
    answer_C = head.answer_logits(hidden_CSH, start_CS, batch.cls_keys).float()
    return torch.stack([start_CS, end_CS, answer_C[:, None].expand_as(start_CS)], dim=-1)


def conditioned_loss(
    model: AlbertForTasks, batch: ExampleBatch, logits: LogitsFunction = _conditioned_logits
) -> dict[LossName, LossSums]:
    """Return the loss of question answering by a start-conditioned head (run_squad_v2).

    To the loss of `span_loss`, with the end given the true start, half the binary cross-entropy
    of "no answer" is added; a window has none where it points at [CLS].

    Args:
        logits: `_conditioned_logits`, optionally compiled.
    """
    logits_CS3 = logits(model, batch)
    spans = span_loss(model, batch, lambda *_: logits_CS3[..., :2])["question-answering"]
    has_none_C = (batch.targets[:, 0] == 0).float()
    answerability = F.binary_cross_entropy_with_logits(
        logits_CS3[:, 0, 2], has_none_C, reduction="sum"
    )
    return {"question-answering": replace(spans, loss=spans.loss + answerability / 2)}


def conditioned_loss_function(*, compiles: bool) -> LossFunction:
    """Return the loss function of questions for a start-conditioned head."""
    if not compiles:
        return conditioned_loss
    return partial(conditioned_loss, logits=compile_logits(_conditioned_logits))
