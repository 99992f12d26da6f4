"""Multiple choice of a finetuning run: its examples, and validation on it."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from albert_serve.tokenizer import AlbertTokenizer
from training.data.choices import ChoiceBatches, ChoiceExample, choice_examples
from training.data.labelled.choices import read_choice_splits
from training.data.labelled.folders import CHOICES, labelled_files
from training.evaluation.validation import Validation
from training.finetuning.examples import tokenise_splits
from training.loop.progress import RunError
from training.loop.selection import Selection
from training.run.options import columns_of

_TRAINING: Final = "training"
_VALIDATION: Final = "validation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The data of multiple choice in a run.

    Attributes:
        held_out: examples of validation.
        labels: keys of `config.json` that name labels, of which multiple choice has none.
    """

    examples: Sequence[ChoiceExample]
    tokenizer: AlbertTokenizer
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

    def selection(self, options: argparse.Namespace) -> Selection:
        """Return the selection of the best validation, by accuracy or `--metric loss`."""
        figure = options.metric or "accuracy"
        return Selection(figure=figure, chance=self._chance(figure), patience=options.patience)

    def _chance(self, figure: str) -> float:
        """Return the loss of equal scores, or the accuracy of the most frequent position."""
        if figure == "loss":
            return sum(math.log(len(each.choices)) for each in self.held_out) / len(self.held_out)
        return max(Counter(each.target for each in self.held_out).values()) / len(self.held_out)


def build_choices(options: argparse.Namespace, tokenizer: AlbertTokenizer) -> Choices:
    """Read and tokenise the questions of the training and validation files.

    Raises:
        CorpusError: files cannot be read, or hold what cannot be trained; all of it is listed.
        RunError: options do not fit the data.
    """
    _check(options)
    files = {_TRAINING: labelled_files(options.multiple_choice, "train", suffixes=CHOICES)}
    if options.validation:
        files[_VALIDATION] = labelled_files(options.validation, "validation", suffixes=CHOICES)
    errors: list[str] = []
    texts = read_choice_splits(files, columns_of(options), options.choice_columns, errors)
    examples = tokenise_splits(options, tokenizer, texts, choice_examples, "questions", errors)
    return Choices(
        examples=examples[_TRAINING],
        tokenizer=tokenizer,
        held_out=examples.get(_VALIDATION, ()),
    )


def _check(options: argparse.Namespace) -> None:
    if options.text_classification:
        raise RunError(
            "--text-classification and --multiple-choice do not go together: a checkpoint has "
            "one head named classifier"
        )
    for option in ("labels", "class_weights", "problem_type"):
        if getattr(options, option) is not None:
            name = option.replace("_", "-")
            raise RunError(f"--{name} goes with --text-classification, not --multiple-choice")
    if options.metric not in (None, "accuracy", "loss"):
        raise RunError(
            f"--metric {options.metric} is none of multiple choice; take accuracy or loss"
        )
