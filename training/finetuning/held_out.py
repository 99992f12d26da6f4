"""Validation of a finetuning run on held-out questions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from albert_serve.tokenizer import AlbertTokenizer
from training.data.collate import collate_examples
from training.data.questions import Question, SpanExample, read_located, span_examples
from training.evaluation.questions import HeldOutQuestions, lay_questions
from training.evaluation.torch_engine import Item
from training.evaluation.validation import Validation
from training.finetuning.questions import choose_head, window_length
from training.loop.progress import RunError
from training.loop.selection import Selection

_METRICS: Final = ("f1", "exact_match", "loss")
# Windows of a batch of validation.
_VALIDATED_TOGETHER: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """The held-out questions of a run.

    Attributes:
        figure: what decides which validation is best: `f1`, `exact_match` or `loss`.
        items: the questions as they are asked; none where the loss decides.
        windows: of the questions, as in training.
        labels: keys of `config.json` that name labels, of which questions have none.
    """

    held_out: Sequence[Question]
    items: Sequence[Item]
    figure: str
    windows: Sequence[SpanExample]
    labels: dict[str, Any] = field(default_factory=dict)

    def validation(self, *, every: int, row_length: int) -> Validation:
        """Return the validation: by the answers, or by the loss of the windows."""
        windows = sorted(self.windows, key=lambda window: len(window.ids))
        batches = [
            collate_examples(
                "question-answering",
                windows[begin : begin + _VALIDATED_TOGETHER],
                row_length=max(row_length, len(windows[-1].ids)),
            )
            for begin in range(0, len(windows), _VALIDATED_TOGETHER)
        ]
        return Validation(
            batches=batches,
            every=every,
            tasks=("question-answering",),
            questions=None if self.figure == "loss" else HeldOutQuestions(items=self.items),
        )

    def selection(self, options: argparse.Namespace) -> Selection:
        """Return the selection of the best validation; by chance, no question has an answer."""
        num_empty = sum(not question.answers for question in self.held_out)
        chance = None if self.figure == "loss" else 100 * num_empty / len(self.held_out)
        return Selection(figure=self.figure, chance=chance, patience=options.patience)


def build_held_out_questions(
    options: argparse.Namespace, tokenizer: AlbertTokenizer, *, max_positions: int
) -> Questions:
    """Read the questions of `--validation`.

    Args:
        max_positions: of the model.

    Raises:
        CorpusError: files cannot be read, or hold what cannot be asked; all of it is listed.
        EvaluationError: as `lay_questions`.
        RunError: `--metric` is none of questions.
    """
    figure = options.metric or "f1"
    if figure not in _METRICS:
        raise RunError(f"--metric {figure} is none of questions; take {', '.join(_METRICS)}")
    questions, _ = read_located(options.validation)
    head = choose_head(options)
    asked = questions if figure != "loss" else []
    length = window_length(options, max_positions)
    return Questions(
        held_out=questions,
        items=lay_questions(asked, tokenizer, max_positions=max_positions, head=head),
        figure=figure,
        windows=[
            window
            for question in questions
            for window in span_examples(question, tokenizer, length=length)
        ],
    )
