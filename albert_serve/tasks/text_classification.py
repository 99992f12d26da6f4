"""Text classification: a score for each label of a text, or of a pair of texts.

A model may have several classifiers, of which a request names one.

Scores are those of `transformers`' pipeline. All labels are answered unless `top_k` is set, as in
Hugging Face's inference API; the pipeline itself answers the best one only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import (
    LabelScore,
    ScoreFunction,
    TextClassificationParameters,
    TextInput,
)
from albert_serve.bundle.manifest import EarlyExitDefaults, HeadEntry, TaskEntry
from albert_serve.bundle.weights import CLASSIFICATION, further_head
from albert_serve.errors import InvalidInputError
from albert_serve.tasks.base import EarlyExit, Logits, Prepared, TaskSetup
from albert_serve.tasks.probability import finite, sigmoid, softmax
from albert_serve.tasks.truncation import Truncator

ALL_LAYERS: Final = "max_layers and patience have no effect on a GPU: all layers were computed"


@dataclass(frozen=True, slots=True)
class TextClassification:
    """Classifies texts by the labels of one head; the default one, unless a request names it."""

    setup: TaskSetup

    def prepare(
        self, item: str | TextInput, parameters: TextClassificationParameters
    ) -> Prepared[list[LabelScore]]:
        """Encode one text or pair; the answer has the best label first.

        Raises:
            TextTooLongError: it does not fit and may not be truncated.
            InvalidInputError: parameters ask for a head that the model lacks, or for other
                layers than it has.
        """
        task, head = self._head(parameters.head)
        texts = TextInput(text=item) if isinstance(item, str) else item
        truncator = Truncator(self.setup.tokenizer, self.setup.max_positions, parameters.truncation)
        fitted = truncator.fit_texts(texts.text, texts.text_pair)
        early_exit = self._early_exit(head, parameters)
        is_ignored = early_exit and _limits(parameters) and not self.setup.stops_early
        return Prepared(
            inputs=[replace(fitted.at_cls(task), early_exit=early_exit)],
            finish=lambda logits: _finish(logits[0], head, parameters),
            num_truncated=fitted.num_truncated,
            cuts=fitted.cuts("" if isinstance(item, str) else ".text", ".text_pair"),
            warnings=[ALL_LAYERS] if is_ignored else [],
        )

    @property
    def one_output_head(self) -> str | None:
        """The first head of one output, as the engine calls it; None if there is none."""
        entry = self.setup.entry
        assert entry is not None
        heads = [self._head(name) for name in (entry.default_head, *entry.heads)]
        return next((head for head, each in heads if each.num_outputs == 1), None)

    def _head(self, name: str | None) -> tuple[str, HeadEntry]:
        """Return a head as the engine calls it, and its entry."""
        entry = self.setup.entry
        assert entry is not None
        if name in (None, entry.default_head):
            return CLASSIFICATION, entry
        if name not in entry.heads:
            raise no_head(name, [entry.default_head, *entry.heads])
        return further_head(name), entry.heads[name]

    def _early_exit(
        self, head: HeadEntry, parameters: TextClassificationParameters
    ) -> EarlyExit | None:
        defaults = head.adaptive_depth if isinstance(head, TaskEntry) else None
        num_layers = self.setup.num_layers
        if defaults is None:
            if not _limits(parameters):
                return None
            raise InvalidInputError(
                "max_layers and patience are of models that were trained with --adaptive-depth, "
                "and of their default head; this one answers after all of its "
                f"{num_layers} layers"
            )
        if (parameters.max_layers or 0) > num_layers:
            raise InvalidInputError(
                f"max_layers is {parameters.max_layers}; the model has {num_layers} layers"
            )
        return resolve_early_exit(defaults, num_layers, parameters.max_layers, parameters.patience)


def _finish(
    logits: Logits, head: HeadEntry, parameters: TextClassificationParameters
) -> list[LabelScore]:
    labels = label_names(head)
    scores = _apply(parameters.function_to_apply or _default_function(head), logits[0])
    order = np.argsort(-scores, kind="stable")[: parameters.top_k]
    return [LabelScore(label=labels[i], score=float(scores[i])) for i in order]


def _default_function(head: HeadEntry) -> ScoreFunction:
    if head.problem_type == "regression":
        return "none"
    if head.problem_type == "multi_label_classification" or head.num_outputs == 1:
        return "sigmoid"
    return "softmax"


def _limits(parameters: TextClassificationParameters) -> bool:
    """Whether the request limits the layers."""
    return parameters.max_layers is not None or parameters.patience is not None


def label_names(entry: HeadEntry) -> list[str]:
    """Return the names of a classifier's labels, or LABEL_0 and so on, as `transformers`."""
    return entry.labels or [f"LABEL_{index}" for index in range(entry.num_outputs)]


def no_head(name: str, names: Sequence[str]) -> InvalidInputError:
    """Return the error of a request for a classifier that is none of those of the model."""
    return InvalidInputError(f"the model has no head {name!r}; it has {', '.join(names)}")


def resolve_early_exit(
    defaults: EarlyExitDefaults,
    num_layers: int,
    max_layers: int | None = None,
    patience: int | None = None,
) -> EarlyExit | None:
    """Return when a text is answered; None: after all layers.

    The defaults are of a request with neither limit: one alone does not go with the other's.
    """
    if max_layers is None and patience is None:
        max_layers, patience = defaults.max_layers, defaults.patience
    max_layers = max_layers or num_layers
    patience = min(patience or num_layers, num_layers)
    if max_layers == patience == num_layers:
        return None
    return EarlyExit(max_layers=max_layers, patience=patience)


def _apply(function: ScoreFunction, logits: Logits) -> NDArray[np.float64]:
    if function == "none":
        return finite(logits)
    return sigmoid(logits) if function == "sigmoid" else softmax(logits)
