"""Feature extraction: the embedding of a text, or the vectors of its tokens.

They are the encoder's last hidden states, so that every bundle has this task and none needs a head
for it. The mean is over all tokens of the text with [CLS] and [SEP], as `sentence-transformers`
takes it with an attention mask; the vectors of tokens are those of `transformers`' pipeline, to
which the model's form of a sentence's vector does not apply.

Shape legend: R tokens, or one if they are pooled, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from albert_serve.api.embeddings import (
    FEATURE_EXTRACTION,
    FeatureExtractionAnswer,
    FeatureExtractionParameters,
    Pooling,
)
from albert_serve.tasks.base import Logits, Prepared, Reduction, TaskSetup, finite
from albert_serve.tasks.truncation import Truncator, check_not_empty

# An object, its place in a list, and its digits, which are copied once.
_BYTES_PER_NUMBER: Final = 56
# Past this the numbers say nothing more of hidden states in float32, and a reply has half the size.
_NUM_DECIMALS: Final = 8
# As torch's `normalize` has it, so that a vector of zeros stays one.
_MIN_LENGTH: Final = 1e-12
_REDUCTIONS: Final[Mapping[Pooling, Reduction]] = {
    "mean": "mean",
    "max": "max",
    "cls": "none",
    "none": "none",
}


@dataclass(frozen=True, slots=True)
class FeatureExtraction:
    """Returns the encoder's hidden states of texts, pooled or not."""

    setup: TaskSetup

    def prepare(
        self, item: str, parameters: FeatureExtractionParameters
    ) -> Prepared[FeatureExtractionAnswer]:
        """Encode one text."""
        defaults, max_length = self.setup.sentence_vectors, self.setup.max_positions
        pooling, normalize = parameters.pooling or defaults.pooling, parameters.normalize
        if pooling != "none":
            max_length = min(max_length, defaults.max_length or max_length)
            normalize = defaults.normalize if normalize is None else normalize
        truncator = Truncator(self.setup.tokenizer, max_length, parameters.effective_truncation)
        check_not_empty("text", item)
        fitted = truncator.fit(truncator.encode(item), direction=parameters.truncation_direction)
        encoder_input = fitted.at(
            FEATURE_EXTRACTION, [0] if pooling == "cls" else None, _REDUCTIONS[pooling]
        )
        num_rows = len(encoder_input.ids) if pooling == "none" else 1
        return Prepared(
            inputs=[encoder_input],
            finish=lambda logits: _finish(logits[0], pooling, is_scaled=bool(normalize)),
            num_truncated=fitted.num_truncated,
            answer_bytes=num_rows * self.setup.hidden_size * _BYTES_PER_NUMBER,
        )


def _finish(hidden_RH: Logits, pooling: Pooling, *, is_scaled: bool) -> FeatureExtractionAnswer:
    """Return the one row of a pooled text; else all rows, in the pipeline's list of one text."""
    vectors_RH = finite(hidden_RH)
    if is_scaled:
        lengths_R1 = np.linalg.norm(vectors_RH, axis=-1, keepdims=True)
        vectors_RH = vectors_RH / np.maximum(lengths_R1, _MIN_LENGTH)
    numbers: list[list[float]] = np.round(vectors_RH, _NUM_DECIMALS).tolist()
    return [numbers] if pooling == "none" else numbers[0]
