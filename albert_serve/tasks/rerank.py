"""Reranking: texts in the order in which they answer a query.

A classifier of one output that was trained on pairs scores each pair of query and text, as a
cross-encoder. Its score is the sigmoid of the output. It is the output itself for a regression, or
if the request asks for it. A model without one compares embeddings: the score is the cosine. It is
no task of a manifest and needs no head of its own, so that every bundle has it.

Shape legend: R texts and, last, the query; H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.embeddings import FEATURE_EXTRACTION, FeatureExtractionParameters
from albert_serve.api.rerank import RankedText, RerankReply, RerankRequest
from albert_serve.api.schemas import ScoreFunction
from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.errors import TextTooLongError
from albert_serve.tasks.base import ENTRY_BYTES, Logits, Prepared, Task
from albert_serve.tasks.feature_extraction import MIN_LENGTH, FeatureExtraction
from albert_serve.tasks.probability import finite, sigmoid
from albert_serve.tasks.text_classification import TextClassification
from albert_serve.tasks.truncation import FittedEncoding, Truncator, check_not_empty, named


@dataclass(frozen=True, slots=True)
class Rerank:
    """Scores texts for a query, by a classifier of pairs where there is one."""

    embedder: FeatureExtraction
    classifier: TextClassification | None

    @classmethod
    def open(cls, tasks: Mapping[str, Task]) -> Self:
        """Return the task for a model, by its others."""
        embedder, classifier = tasks[FEATURE_EXTRACTION], tasks.get(CLASSIFICATION)
        assert isinstance(embedder, FeatureExtraction)
        return cls(embedder, classifier if isinstance(classifier, TextClassification) else None)

    def prepare(self, item: RerankRequest, _parameters: None) -> Prepared[RerankReply]:
        """Encode the pairs, or the texts and the query.

        Raises:
            TextTooLongError: one does not fit and may not be truncated.
            InvalidInputError: one is empty.
        """
        scorer = None if self.classifier is None else self.classifier.pair_head
        try:
            return self._embedded(item) if scorer is None else self._paired(item, *scorer)
        except TextTooLongError as error:  # which names the parameter of the other tasks
            message = str(error).replace("parameter truncation", "parameter truncate")
            raise TextTooLongError(message) from error

    def _paired(
        self, item: RerankRequest, head: str, function: ScoreFunction
    ) -> Prepared[RerankReply]:
        is_raw = item.raw_scores or function == "none"
        setup = self.embedder.setup
        truncator = Truncator(
            setup.tokenizer, setup.max_positions, "truncate" if item.truncate else "error"
        )
        check_not_empty("query", item.query)
        with named("query"):
            query = truncator.encode(item.query)  # once: it may be long, and the texts many
        pairs: list[FittedEncoding] = []
        for number, text in enumerate(item.texts):
            check_not_empty(f"texts[{number}]", text)
            with named(f"query and texts[{number}] together"):
                pairs.append(truncator.fit(query, truncator.encode(text)))
        return Prepared(
            inputs=[pair.at_cls(head) for pair in pairs],
            finish=lambda logits: _ranked(item, _of_outputs(logits, is_raw=is_raw)),
            num_truncated=sum(pair.num_truncated for pair in pairs),
            cuts={
                place: at
                for number, pair in enumerate(pairs)
                for place, at in pair.cuts("query", f"texts[{number}]").items()
            },
            answer_bytes=ENTRY_BYTES * len(pairs),
        )

    def _embedded(self, item: RerankRequest) -> Prepared[RerankReply]:
        parameters = FeatureExtractionParameters(truncate=item.truncate)
        places = [*(f"texts[{number}]" for number in range(len(item.texts))), "query"]
        parts: list[Prepared[Any]] = []
        for place, text in zip(places, [*item.texts, item.query], strict=True):
            with named(place):
                parts.append(self.embedder.prepare(text, parameters))
        return Prepared(
            inputs=[each for part in parts for each in part.inputs],
            finish=lambda logits: _ranked(item, _cosines(logits)),
            num_truncated=sum(part.num_truncated for part in parts),
            cuts={
                place: at
                for place, part in zip(places, parts, strict=True)
                for at in part.cuts.values()
            },
            answer_bytes=ENTRY_BYTES * len(parts),
        )


def _of_outputs(logits: Sequence[Logits], *, is_raw: bool) -> NDArray[np.float64]:
    """Return the scores of pairs, from their one output each."""
    outputs_R = np.array([each[0, 0] for each in logits])
    return finite(outputs_R) if is_raw else sigmoid(outputs_R)


def _cosines(rows: Sequence[Logits]) -> NDArray[np.float64]:
    """Return the cosine of each text with the query, which is the last; 0 of a vector of zeros."""
    vectors_RH = finite(np.concatenate(rows))
    lengths_R = np.maximum(np.linalg.norm(vectors_RH, axis=-1), MIN_LENGTH)
    cosines_R: NDArray[np.float64] = (vectors_RH @ vectors_RH[-1]) / (lengths_R * lengths_R[-1])
    return cosines_R[:-1]


def _ranked(item: RerankRequest, scores: NDArray[np.float64]) -> RerankReply:
    return [
        RankedText(
            index=index,
            score=float(scores[index]),
            text=item.texts[index] if item.return_text else None,
        )
        for index in np.argsort(-scores, kind="stable")[: item.top_n].tolist()
    ]
