"""Evaluation of multiple choice: loss and accuracy, of all questions and of each group.

Shape legend: N choices of a question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from albert_serve.tasks.base import EncoderInput, Logits
from albert_serve.tokenizer import AlbertTokenizer
from training.data.choices import ChoiceExample, choice_examples
from training.data.labelled.choices import ChoiceText, groups_of
from training.evaluation.predictions import Item
from training.evaluation.torch_engine import predict_in_torch
from training.losses import Tally, score
from training.model.heads import AlbertForTasks

# Of the figures' names.
PREFIX: Final = "multiple_choice"


def evaluate_choices(
    model: AlbertForTasks,
    tokenizer: AlbertTokenizer,
    questions: Sequence[ChoiceText],
    *,
    truncation: bool = False,
) -> dict[str, Any]:
    """Evaluate multiple choice: accuracy and loss, and those of each group of questions.

    Args:
        truncation: whether long texts are cut to the model's positions.

    Raises:
        CorpusError: texts are longer than the model has positions, and `truncation` is off.
    """
    examples, num_cut = choice_examples(
        questions, tokenizer, length=model.config.max_positions, truncation=truncation
    )
    items = [
        Item(inputs=choice_inputs(example, tokenizer), read=_read_logits) for example in examples
    ]
    predicted = predict_in_torch(model, items, "questions")
    tallies = {name: Tally() for name in ("", *groups_of(questions))}
    for question, logits_N in zip(questions, predicted, strict=True):
        result = score(torch.from_numpy(logits_N)[None], torch.tensor([question.label]))
        for name in {"", question.group}:
            tallies[name].add(result)
    figures: dict[str, Any] = {}
    for name, tally in tallies.items():
        prefix = f"{PREFIX}_{name}" if name else PREFIX
        figures |= {
            f"{prefix}_accuracy": tally.accuracy,
            f"{prefix}_loss": tally.loss,
            f"{prefix}_questions": tally.count,
        }
    return {**figures, f"{PREFIX}_truncated": num_cut}


def choice_inputs(example: ChoiceExample, tokenizer: AlbertTokenizer) -> list[EncoderInput]:
    """Return the input of each choice of a question."""
    return [
        EncoderInput(ids=each.ids, types=each.types, task="multiple-choice", rows=[0])
        for each in example.sequences(tokenizer)
    ]


def _read_logits(logits: list[Logits]) -> list[NDArray[np.float32]]:
    return [np.concatenate(logits)[:, 0]]
