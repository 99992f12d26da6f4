"""Multiple choice of a finetuning run: its examples, and validation on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from albert_serve.tokenizer import AlbertTokenizer
from training.data.choices import ChoiceBatches, ChoiceExample, choice_examples
from training.data.labelled.choices import read_choice_splits
from training.data.labelled.folders import CHOICES, labelled_files
from training.evaluation.validation import Validation
from training.finetuning.data import TRAINING, VALIDATION, DataContext, check_metric


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceData:
    """The data of multiple choice in a run.

    Attributes:
        figure: of validation, that decides: `accuracy` or `loss`.
        held_out: examples of validation.
    """

    examples: Sequence[ChoiceExample]
    tokenizer: AlbertTokenizer
    figure: str = "accuracy"
    held_out: Sequence[ChoiceExample] = ()

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


def build_choices(context: DataContext) -> ChoiceData:
    """Read and tokenise the questions of the training and validation files.

    Raises:
        CorpusError: files cannot be read, or hold what cannot be trained; all of it is listed.
        RunError: options do not fit the data.
    """
    settings = context.settings
    check_metric(settings.metric, ("accuracy", "loss"), "multiple choice")
    files = {TRAINING: labelled_files(settings.multiple_choice, "train", suffixes=CHOICES)}
    if settings.validation:
        held_out = labelled_files(settings.validation, "validation", suffixes=CHOICES)
        files[VALIDATION] = held_out
    texts = read_choice_splits(files, settings.columns, settings.choice_columns)
    examples = context.tokenise(texts, choice_examples, "questions")
    return ChoiceData(
        examples=examples[TRAINING],
        tokenizer=context.tokenizer,
        figure=settings.metric or "accuracy",
        held_out=examples.get(VALIDATION, ()),
    )
