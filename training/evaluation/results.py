"""The results of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.evaluation.choices import Chosen
from training.evaluation.classification import Classified
from training.evaluation.questions import AnsweredQuestion


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The results of an evaluation.

    Attributes:
        figures: by name.
        classified: the answers to the texts of each split.
        chosen: the answers to questions of multiple choice.
        answered: the answers to questions.
        threshold: the null score over which the answer to a question is empty.
    """

    figures: Mapping[str, Any]
    classified: Mapping[str, Classified] = field(default_factory=dict)
    chosen: Chosen | None = None
    answered: Sequence[AnsweredQuestion] = ()
    threshold: float = 0.0
