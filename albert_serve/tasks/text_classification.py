"""Text classification: a score for each label of a text, or of a pair of texts.

Scores are those of `transformers`' pipeline. All labels are answered unless `top_k` is set, as in
Hugging Face's inference API; the pipeline itself answers the best one only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import (
    LabelScore,
    ProblemType,
    ScoreFunction,
    TextClassificationParameters,
    TextInput,
)
from albert_serve.tasks.base import Logits, Prepared
from albert_serve.tasks.fitting import fit
from albert_serve.tasks.probability import finite, sigmoid, softmax
from albert_serve.tokenizer import AlbertTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TextClassification:
    """Classifies texts by the labels of one head.

    Attributes:
        labels: names, in the order of the head's outputs.
        problem_type: selects the score function; None selects it by the number of labels.
    """

    tokenizer: AlbertTokenizer
    max_positions: int
    labels: Sequence[str]
    problem_type: ProblemType | None = None

    def prepare(
        self, item: str | TextInput, parameters: TextClassificationParameters
    ) -> Prepared[list[LabelScore]]:
        """Encode one text or pair; the answer has the best label first.

        Raises:
            TextTooLongError: it does not fit and may not be truncated.
        """
        texts = TextInput(text=item) if isinstance(item, str) else item
        fitted = fit(
            self.tokenizer,
            texts.text,
            texts.text_pair,
            max_positions=self.max_positions,
            truncation=parameters.truncation,
        )
        return Prepared(
            inputs=[fitted.at_cls("text-classification")],
            finish=lambda logits: self._finish(logits[0], parameters),
            num_truncated=fitted.num_truncated,
            cuts=fitted.cuts("" if isinstance(item, str) else ".text", ".text_pair"),
        )

    def _finish(self, logits: Logits, parameters: TextClassificationParameters) -> list[LabelScore]:
        function = parameters.function_to_apply or self._default_function()
        scores = _apply(function, logits[0])
        order = np.argsort(-scores, kind="stable")[: parameters.top_k]
        return [LabelScore(label=self.labels[i], score=float(scores[i])) for i in order]

    def _default_function(self) -> ScoreFunction:
        if self.problem_type == "regression":
            return "none"
        if self.problem_type == "multi_label_classification" or len(self.labels) == 1:
            return "sigmoid"
        return "softmax"


def _apply(function: ScoreFunction, logits: Logits) -> NDArray[np.float64]:
    if function == "none":
        return finite(logits)
    return sigmoid(logits) if function == "sigmoid" else softmax(logits)
