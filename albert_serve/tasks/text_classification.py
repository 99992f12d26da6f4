"""Text classification: a score for each label of a text, or of a pair of texts.

A model may have several classifiers, of which a request names one.

Scores are those of `transformers`' pipeline. All labels are answered unless `top_k` is set, as in
Hugging Face's inference API; the pipeline itself answers the best one only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import (
    LabelScore,
    ProblemType,
    ScoreFunction,
    TextClassificationParameters,
    TextInput,
)
from albert_serve.bundle.manifest import DEFAULT_HEAD, AdaptiveDepth, HeadEntry
from albert_serve.bundle.weights import CLASSIFICATION, further_head
from albert_serve.errors import InvalidInputError
from albert_serve.tasks.base import EarlyExit, Logits, Prepared, TaskSetup
from albert_serve.tasks.probability import finite, sigmoid, softmax
from albert_serve.tasks.truncation import fit
from albert_serve.tokenizer import AlbertTokenizer

ALL_LAYERS: Final = "max_layers and patience have no effect on a GPU: all layers were computed"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextClassification:
    """Classifies texts by the labels of one head.

    Attributes:
        labels: names, in the order of the head's outputs.
        problem_type: selects the score function; None selects it by the number of labels.
        num_layers: of the model.
        adaptive_depth: the defaults of a model that can answer after each; None: it cannot.
        task: the head that reads the rows, by `EncoderInput.task`.
        name: of the head, in requests.
        others: the other classifiers of the model by name, of the default one.
        stops_early: whether the engine can; if not, a request that asks for fewer layers gets a
            warning.
    """

    tokenizer: AlbertTokenizer
    max_positions: int
    labels: Sequence[str]
    problem_type: ProblemType | None = None
    num_layers: int = 0
    adaptive_depth: AdaptiveDepth | None = None
    task: str = CLASSIFICATION
    name: str = DEFAULT_HEAD
    others: Mapping[str, TextClassification] = field(default_factory=dict)
    stops_early: bool = True

    @classmethod
    def open(cls, setup: TaskSetup) -> TextClassification:
        """Return the default classifier of a model, which knows the others."""
        default = cls(
            tokenizer=setup.tokenizer,
            max_positions=setup.max_positions,
            labels=setup.labels,
            problem_type=setup.problem_type,
            num_layers=setup.num_layers,
            adaptive_depth=setup.adaptive_depth,
            name=setup.head,
            stops_early=setup.stops_early,
        )
        others = {
            name: replace(
                default,
                labels=label_names(entry),
                problem_type=entry.problem_type,
                adaptive_depth=None,
                task=further_head(name),
                name=name,
            )
            for name, entry in setup.heads.items()
        }
        return replace(default, others=others)

    def prepare(
        self, item: str | TextInput, parameters: TextClassificationParameters
    ) -> Prepared[list[LabelScore]]:
        """Encode one text or pair; the answer has the best label first.

        Raises:
            TextTooLongError: it does not fit and may not be truncated.
            InvalidInputError: parameters ask for a head that the model lacks, or for other
                layers than it has.
        """
        if parameters.head is not None and parameters.head != self.name:
            return self._other(parameters.head, parameters).prepare(item, parameters)
        texts = TextInput(text=item) if isinstance(item, str) else item
        fitted = fit(
            self.tokenizer,
            texts.text,
            texts.text_pair,
            max_positions=self.max_positions,
            truncation=parameters.truncation,
        )
        early_exit = self._early_exit(parameters)
        is_ignored = early_exit and _limits(parameters) and not self.stops_early
        return Prepared(
            inputs=[replace(fitted.at_cls(self.task), early_exit=early_exit)],
            finish=lambda logits: self._finish(logits[0], parameters),
            num_truncated=fitted.num_truncated,
            cuts=fitted.cuts("" if isinstance(item, str) else ".text", ".text_pair"),
            warnings=[ALL_LAYERS] if is_ignored else [],
        )

    def _other(self, name: str, parameters: TextClassificationParameters) -> TextClassification:
        if name not in self.others:
            raise no_head(name, [self.name, *self.others])
        if self.adaptive_depth is not None and _limits(parameters):
            raise InvalidInputError(
                f"head {name!r} always takes all {self.num_layers} layers; "
                f"max_layers and patience are of the default head {self.name!r}"
            )
        return self.others[name]

    def _finish(self, logits: Logits, parameters: TextClassificationParameters) -> list[LabelScore]:
        function = parameters.function_to_apply or self._default_function()
        scores = _apply(function, logits[0])
        order = np.argsort(-scores, kind="stable")[: parameters.top_k]
        return [LabelScore(label=self.labels[i], score=float(scores[i])) for i in order]

    def _early_exit(self, parameters: TextClassificationParameters) -> EarlyExit | None:
        max_layers, patience = parameters.max_layers, parameters.patience
        if self.adaptive_depth is None:
            if not _limits(parameters):
                return None
            raise InvalidInputError(
                "max_layers and patience are of models that were trained with --adaptive-depth; "
                f"this one answers after all of its {self.num_layers} layers"
            )
        if max_layers is not None and max_layers > self.num_layers:
            raise InvalidInputError(
                f"max_layers is {max_layers}; the model has {self.num_layers} layers"
            )
        return resolve_early_exit(self.adaptive_depth, self.num_layers, max_layers, patience)

    def _default_function(self) -> ScoreFunction:
        if self.problem_type == "regression":
            return "none"
        if self.problem_type == "multi_label_classification" or len(self.labels) == 1:
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
    defaults: AdaptiveDepth,
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
