"""Text classification: a score for each label of a text, or of a pair of texts.

If a model has several classifiers, a request can select one by name. Scores equal `transformers`'
pipeline. The answer has all labels unless `top_k` is set, as in Hugging Face's inference API; the
pipeline returns only the best label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import (
    LabelScore,
    ScoreFunction,
    TextClassificationParameters,
    TextInput,
)
from albert_serve.bundle.manifest import HeadEntry, head_name
from albert_serve.errors import InvalidInputError
from albert_serve.tasks.base import Logits, Prepared, TaskSetup, finite, sigmoid, softmax
from albert_serve.tasks.truncation import Truncator, check_not_empty


@dataclass(frozen=True, slots=True)
class TextClassification:
    """The task that scores the labels of a classifier for a text or a pair of texts."""

    setup: TaskSetup

    def prepare(
        self, item: str | TextInput, parameters: TextClassificationParameters
    ) -> Prepared[list[LabelScore]]:
        """Encode one text or pair. The answer has the best label first."""
        task, head = self._head(parameters.head)
        texts = TextInput(text=item) if isinstance(item, str) else item
        check_not_empty("text", texts.text)
        if texts.text_pair is not None:
            check_not_empty("text_pair", texts.text_pair)
        truncator = Truncator(self.setup.tokenizer, self.setup.max_positions, parameters.truncation)
        fitted = truncator.fit_texts(texts.text, texts.text_pair)
        return Prepared(
            inputs=[fitted.cls_input(task)],
            finish=lambda logits: _finish(logits[0], head, parameters),
            num_truncated=fitted.num_truncated,
        )

    def _head(self, name: str | None) -> tuple[str, HeadEntry]:
        """Return the engine's name and the entry of a classifier (default: the first one)."""
        heads = {head_name(head, entry): (head, entry) for head, entry in self.setup.heads.items()}
        name = next(iter(heads)) if name is None else name
        if name not in heads:
            raise no_head(name, list(heads))
        return heads[name]


def _finish(
    logits: Logits, head: HeadEntry, parameters: TextClassificationParameters
) -> list[LabelScore]:
    labels = label_names(head)
    if parameters.function_to_apply is None:
        scores = _apply(_default_function(head), logits[0] / np.float32(head.temperature))
    else:
        scores = _apply(parameters.function_to_apply, logits[0])
    order = np.argsort(-scores, kind="stable")[: parameters.top_k]
    return [LabelScore(label=labels[i], score=float(scores[i])) for i in order]


def _default_function(head: HeadEntry) -> ScoreFunction:
    if head.problem_type == "regression":
        return "none"
    if head.problem_type == "multi_label_classification" or head.num_outputs == 1:
        return "sigmoid"
    return "softmax"


def label_names(entry: HeadEntry) -> list[str]:
    """Return the names of a classifier's labels, or LABEL_0 and so on, as `transformers` does."""
    return entry.labels or [f"LABEL_{index}" for index in range(entry.num_outputs)]


def no_head(name: str, names: Sequence[str]) -> InvalidInputError:
    """Return the error of a request for a classifier that the model lacks."""
    return InvalidInputError(f"The model has no head {name!r}. Choose one of {', '.join(names)}.")


def _apply(function: ScoreFunction, logits: Logits) -> NDArray[np.float64]:
    if function == "none":
        return finite(logits)
    return sigmoid(logits) if function == "sigmoid" else softmax(logits)
