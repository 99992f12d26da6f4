"""Multiple choice of a finetuning run: its examples, and validation on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from albert_serve.tokenizer import AlbertTokenizer
from training.data.choices import ChoiceBatches, ChoiceExample, choice_examples
from training.data.labelled.choices import read_choice_splits
from training.data.labelled.folders import CHOICES, labelled_files
from training.evaluation.validation import Validation
from training.finetuning.data import TRAINING, VALIDATION, DataContext
from training.finetuning.settings import FinetuneSettings
from training.loop.progress import RunError
from training.run.flags import flag_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The data of multiple choice in a run.

    Attributes:
        figure: of validation, that decides: `accuracy` or `loss`.
        held_out: examples of validation.
        labels: keys of `config.json` that name labels, of which multiple choice has none.
    """

    examples: Sequence[ChoiceExample]
    tokenizer: AlbertTokenizer
    figure: str = "accuracy"
    held_out: Sequence[ChoiceExample] = ()
    labels: dict[str, Any] = field(default_factory=dict)

    def validation(self, *, every: int, row_length: int) -> Validation:
        """Return the validation on the held-out questions, in batches of like lengths."""
        examples = sorted(self.held_out, key=lambda example: max(example.lengths))
        return Validation(
            batches=ChoiceBatches(examples, self.tokenizer, row_length=row_length),
            every=every,
            tasks=("multiple-choice",),
        )

    @property
    def chance(self) -> float:
        """The loss of equal scores, or the accuracy of the most frequent position."""
        if self.figure == "loss":
            return sum(math.log(len(each.choices)) for each in self.held_out) / len(self.held_out)
        return max(Counter(each.target for each in self.held_out).values()) / len(self.held_out)


def build_choices(context: DataContext) -> Choices:
    """Read and tokenise the questions of the training and validation files.

    Raises:
        CorpusError: files cannot be read, or hold what cannot be trained; all of it is listed.
        RunError: options do not fit the data.
    """
    settings = context.settings
    _check(settings)
    files = {TRAINING: labelled_files(settings.multiple_choice, "train", suffixes=CHOICES)}
    if settings.validation:
        held_out = labelled_files(settings.validation, "validation", suffixes=CHOICES)
        files[VALIDATION] = held_out
    texts = read_choice_splits(files, settings.columns, settings.choice_columns)
    examples = context.tokenise(texts, choice_examples, "questions")
    return Choices(
        examples=examples[TRAINING],
        tokenizer=context.tokenizer,
        figure=settings.metric or "accuracy",
        held_out=examples.get(VALIDATION, ()),
    )


def _check(settings: FinetuneSettings) -> None:
    if settings.text_classification:
        raise RunError(
            "--text-classification and --multiple-choice do not go together: a checkpoint has "
            "one head named classifier"
        )
    for name in ("labels", "class_weights", "problem_type"):
        if getattr(settings, name):
            raise RunError(
                f"{flag_name(name)} goes with --text-classification, not --multiple-choice"
            )
    if settings.metric not in (None, "accuracy", "loss"):
        raise RunError(
            f"--metric {settings.metric} is none of multiple choice; take accuracy or loss"
        )
