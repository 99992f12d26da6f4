"""Question answering: its options and data, its head, and the loss of a start-conditioned one.

Shape legend: C windows, S positions, H hidden size.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from albert_serve.bundle.weights import QuestionHead, question_head_of
from albert_serve.progress import progress
from albert_serve.tasks.question_answering.task import DEFAULT_MAX_SEQ_LEN
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, LossName
from training.data.questions import SpanExample, read_located, span_examples
from training.loop.progress import RunError, read_record
from training.losses import (
    LogitsFunction,
    LossFunction,
    Score,
    compile_logits,
    example_rows,
    span_scores,
)
from training.model.checkpoint import read_tasks
from training.model.heads import AlbertForTasks
from training.model.start_conditioned import StartConditionedHead


def add_questions(group: argparse._ArgumentGroup) -> None:
    """Add the options of question answering."""
    group.add_argument("--question-answering", nargs="+", type=Path, help="SQuAD files")
    group.add_argument(
        "--question-head",
        choices=get_args(QuestionHead),
        help="start and end of an answer by themselves, or the end given the start with a beam "
        "search, and a logit of no answer, as the paper has it for SQuAD 2.0 (the checkpoint's, or "
        "independent)",
    )


def with_question_length(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with the length of windows, where neither they nor the recipe give one.

    It is that of the run, or of the first of several seeds, if one is known (of versions that
    recorded none, its --length), or else the service's.
    """
    if not options.question_answering or options.question_length is not None:
        return options
    folders = (options.output, *sorted(options.output.glob("seed-*")))
    known = next(filter(None, map(read_record, folders)), {})
    length = int(known.get("question_length", known.get("length", DEFAULT_MAX_SEQ_LEN)))
    return argparse.Namespace(**{**vars(options), "question_length": length})


def window_length(options: argparse.Namespace, max_positions: int) -> int:
    """Return the maximum tokens of a question with a window of its context."""
    length: int = min(options.question_length, max_positions)
    return length


def question_examples(
    options: argparse.Namespace, tokenizer: AlbertTokenizer, *, max_positions: int
) -> list[SpanExample]:
    """Read the questions, repair their answers' places, and return their windows.

    Args:
        max_positions: of the model.

    Raises:
        CorpusError: files cannot be read, or answers have no place; all of it is listed.
    """
    questions, num_repaired = read_located(options.question_answering)
    if num_repaired:
        print(
            f"{num_repaired:,} of {len(questions):,} answers did not stand at their answer_start; "
            "the only place that fits was taken"
        )
    length = window_length(options, max_positions)
    return [
        example
        for question in progress(questions, title="tokenising questions", unit="questions")
        for example in span_examples(question, tokenizer, length=length)
    ]


def choose_head(options: argparse.Namespace) -> QuestionHead:
    """Return the head that questions are trained with: by default the checkpoint's own.

    Raises:
        RunError: one is asked for, and no questions are given.
    """
    if options.question_head is not None and not options.question_answering:
        raise RunError("--question-head is of question answering; give --question-answering")
    num_outputs = read_tasks(options.initialize_from).get("question-answering", 0)
    stored = question_head_of("question-answering", num_outputs)
    head: QuestionHead = options.question_head or stored or "independent"
    return head


def conditioned_logits(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
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
    answer_C = head.answer_logits(hidden_CSH, start_CS).float()
    return torch.stack([start_CS, end_CS, answer_C[:, None].expand_as(start_CS)], dim=-1)


def conditioned_scores(
    model: AlbertForTasks, batch: ExampleBatch, logits: LogitsFunction = conditioned_logits
) -> dict[LossName, Score]:
    """Return the score of question answering by a start-conditioned head (run_squad_v2).

    To the loss of `span_scores`, with the end given the true start, half the binary cross-entropy
    of "no answer" is added; a window has none where it points at [CLS].

    Args:
        logits: `conditioned_logits`, optionally compiled.
    """
    logits_CS3 = logits(model, batch)
    spans = span_scores(model, batch, lambda *_: logits_CS3[..., :2])["question-answering"]
    has_none_C = (batch.targets[:, 0] == 0).float()
    answerability = F.binary_cross_entropy_with_logits(
        logits_CS3[:, 0, 2], has_none_C, reduction="sum"
    )
    return {"question-answering": replace(spans, loss=spans.loss + answerability / 2)}


def conditioned_loss(*, compiles: bool) -> LossFunction:
    """Return the loss function of questions for a start-conditioned head."""
    if not compiles:
        return conditioned_scores
    return partial(conditioned_scores, logits=compile_logits(conditioned_logits))
