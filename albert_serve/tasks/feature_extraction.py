"""Feature extraction: the embedding of a text, or the vectors of its tokens.

Vectors are the encoder's last hidden states, so every bundle has this task without a head. The mean
includes [CLS] and [SEP], as in `sentence-transformers`. Token vectors equal those of
`transformers`' pipeline, and the model's defaults for embeddings do not apply to them.

Shape legend: R tokens (1 if they are pooled), H hidden size.
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

# Memory of a number in an answer: its object, its list entry, and two copies of its digits.
_BYTES_PER_NUMBER: Final = 56
# More decimals would exceed the precision of float32, and double the size of a reply.
_NUM_DECIMALS: Final = 8
# Vectors are divided by at least this length, as in torch's `normalize`, so zeros stay zeros.
_MIN_LENGTH: Final = 1e-12
_REDUCTIONS: Final[Mapping[Pooling, Reduction]] = {
    "mean": "mean",
    "max": "max",
    "cls": "none",
    "none": "none",
}


@dataclass(frozen=True, slots=True)
class FeatureExtraction:
    """The task that returns the encoder's hidden states of texts, pooled or not."""

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
        encoder_input = fitted.input_for_rows(
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
    """Return the vector of a pooled text, or else all token vectors, nested as in the pipeline."""
    vectors_RH = finite(hidden_RH)
    if is_scaled:
        lengths_R1 = np.linalg.norm(vectors_RH, axis=-1, keepdims=True)
        vectors_RH = vectors_RH / np.maximum(lengths_R1, _MIN_LENGTH)
    numbers: list[list[float]] = np.round(vectors_RH, _NUM_DECIMALS).tolist()
    return [numbers] if pooling == "none" else numbers[0]
