"""Evaluation of multiple choice: loss and accuracy of all questions, and of each group.

Shape legend: N choices of a question, Q questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from albert_serve.tasks.base import EncoderInput, Logits
from albert_serve.tokenizer import AlbertTokenizer
from training.model.heads import MULTIPLE_CHOICE, AlbertForTasks
from training.tasks.engine import EngineItem, TorchEngine, predict
from training.tasks.multiple_choice.files import ChoiceText, choice_examples, groups_of

# Prefix of the metrics' names.
PREFIX: Final = "multiple_choice"


@dataclass(frozen=True, kw_only=True)
class ChoicePredictions:
    """A model's predictions for multiple-choice questions.

    Attributes:
        logits: (N,) logits of each question's choices, in fp32.
        num_truncated: number of questions with a truncated text.
    """

    questions: Sequence[ChoiceText]
    logits: Sequence[NDArray[np.float32]]
    num_truncated: int = 0

    @cached_property
    def losses_Q(self) -> NDArray[np.float64]:
        """The cross-entropy of each question."""
        pairs = zip(self.logits, self.questions, strict=True)
        return np.array(
            [
                F.cross_entropy(torch.from_numpy(logits_N), torch.tensor(question.label)).item()
                for logits_N, question in pairs
            ]
        )

    @cached_property
    def predictions_Q(self) -> NDArray[np.int64]:
        """The index of the predicted choice of each question."""
        return np.array([logits_N.argmax() for logits_N in self.logits])

    @cached_property
    def is_right_Q(self) -> NDArray[np.bool_]:
        """Whether the predicted choice is right."""
        labels_Q = np.array([question.label for question in self.questions])
        is_right_Q: NDArray[np.bool_] = self.predictions_Q == labels_Q
        return is_right_Q

    def groups(self) -> dict[str, dict[str, float]]:
        """Return accuracy, loss and number of questions by group, with "" for all questions."""
        group_of_Q = np.array([question.group for question in self.questions])
        masks = {name: group_of_Q == name for name in groups_of(self.questions)}
        return {
            name: {
                "accuracy": float(self.is_right_Q[mask_Q].mean()),
                "loss": float(self.losses_Q[mask_Q].mean()),
                "questions": int(mask_Q.sum()),
            }
            for name, mask_Q in {"": np.full(len(group_of_Q), True), **masks}.items()
        }

    def figures(self) -> dict[str, Any]:
        """Return the metrics of all questions and groups, and the number of truncated questions."""
        figures: dict[str, Any] = {
            f"{PREFIX}_{name}_{metric}" if name else f"{PREFIX}_{metric}": value
            for name, metrics in self.groups().items()
            for metric, value in metrics.items()
        }
        return {**figures, f"{PREFIX}_truncated": self.num_truncated}


def choose(
    model: AlbertForTasks,
    tokenizer: AlbertTokenizer,
    questions: Sequence[ChoiceText],
    *,
    length: int,
    truncation: bool = True,
) -> ChoicePredictions:
    """Answer multiple-choice questions."""
    examples, num_truncated = choice_examples(
        questions, tokenizer, length=length, truncation=truncation
    )
    items = [
        EngineItem(
            inputs=[
                EncoderInput(ids=sequence.ids, types=sequence.types, task=MULTIPLE_CHOICE, rows=[0])
                for sequence in example.sequences(tokenizer)
            ],
            decode=_decode,
        )
        for example in examples
    ]
    logits = predict(TorchEngine(model), items, "questions")
    return ChoicePredictions(questions=questions, logits=logits, num_truncated=num_truncated)


def _decode(logits: list[Logits]) -> list[NDArray[np.float32]]:
    return [np.concatenate(logits)[:, 0]]
