"""Zero-shot classification: labels that the model was not trained on.

A classifier of premises and hypotheses (MNLI) reads the text with a sentence about each label. The
score of a label is the softmax of its entailment logit over all labels or, with `multi_label`, over
entailment and contradiction. See Yin et al. (2019), "Benchmarking Zero-shot Text Classification",
section 4.2. Scores equal `transformers`' pipeline.

Shape legend: N labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from albert_serve.api.schemas import LabelScore
from albert_serve.api.zero_shot import ZeroShotAnswer, ZeroShotParameters
from albert_serve.bundle.manifest import HeadEntry
from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.errors import NotFoundError
from albert_serve.tasks.base import ENTRY_BYTES, Logits, Prepared, Task, sigmoid, softmax
from albert_serve.tasks.text_classification import TextClassification, label_names
from albert_serve.tasks.truncation import Truncator, check_not_empty, prefix_errors

_ENTAILMENT: Final = "entail"
_CONTRADICTION: Final = "contradict"


@dataclass(frozen=True, slots=True)
class ZeroShot:
    """The task that classifies texts by the labels of a request.

    Attributes:
        head: name of the classifier in the engine.
        entailment, contradiction: columns of these labels in the logits.
    """

    classifier: TextClassification
    head: str
    entailment: int
    contradiction: int

    @classmethod
    def open(cls, tasks: Mapping[str, Task]) -> Self:
        """Return the task for a model that has these other tasks."""
        classifier = tasks[CLASSIFICATION]
        assert isinstance(classifier, TextClassification)
        for name, entry in classifier.setup.heads.items():
            if (entailment := _column(entry, _ENTAILMENT)) is not None:
                contradiction = _column(entry, _CONTRADICTION)
                if contradiction is None:  # `transformers` makes this guess, too
                    contradiction = 0 if entailment else entry.num_outputs - 1
                return cls(classifier, name, entailment, contradiction)
        raise NotFoundError(
            'This model has no classifier with a label "entailment". Zero-shot classification '
            "requires a classifier that was trained on MNLI."
        )

    def prepare(self, item: str, parameters: ZeroShotParameters) -> Prepared[ZeroShotAnswer]:
        """Encode the text with a sentence about each label."""
        check_not_empty("text", item)
        setup, labels = self.classifier.setup, parameters.candidate_labels
        truncator = Truncator(setup.tokenizer, setup.max_positions, parameters.truncation)
        text = truncator.encode(item)  # once, because there may be many labels
        pairs = []
        for index, label in enumerate(labels):
            path = f"candidate_labels[{index}]"
            check_not_empty(path, label)
            with prefix_errors(f"the text with {path}"):
                hypothesis = truncator.encode(parameters.hypothesis_template.replace("{}", label))
                pairs.append(truncator.fit(text, hypothesis))
        return Prepared(
            inputs=[pair.cls_input(self.head) for pair in pairs],
            finish=lambda logits: self._finish(logits, parameters),
            num_truncated=sum(pair.num_truncated for pair in pairs),
            answer_bytes=ENTRY_BYTES * len(pairs),
        )

    def _finish(self, logits: Sequence[Logits], parameters: ZeroShotParameters) -> ZeroShotAnswer:
        labels = parameters.candidate_labels
        entailment_N = np.array([row[0, self.entailment] for row in logits])
        contradiction_N = np.array([row[0, self.contradiction] for row in logits])
        if parameters.multi_label or len(labels) == 1:
            scores_N = sigmoid(entailment_N - contradiction_N)
        else:
            scores_N = softmax(entailment_N)
        order = np.argsort(-scores_N, kind="stable").tolist()
        return [LabelScore(label=labels[i], score=float(scores_N[i])) for i in order]


def _column(entry: HeadEntry, prefix: str) -> int | None:
    """Return the index of the first label with this prefix, in upper or lower case, or None."""
    names = enumerate(label_names(entry))
    return next((index for index, name in names if name.lower().startswith(prefix)), None)
