"""Multiple choice in a run: its configuration, its micro-batches, its loss and its validation.

All choices of a question are packed together.

Shape legend: C sequences, which are choices, Q questions, K choices of a question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, LossName, MicroBatch
from training.data.collate import collate_examples
from training.data.labelled.columns import Columns
from training.data.labelled.folders import CHOICES, labelled_files
from training.data.packing import best_row_length
from training.data.streams import NUM_SAMPLED_BATCHES, ExampleStream, shuffled_batches
from training.loop.validation import Validation
from training.losses import LogitsFunction, LossSums, cls_logits, cross_entropy
from training.model.heads import MULTIPLE_CHOICE, AlbertForTasks
from training.tasks.base import (
    TRAINING,
    VALIDATION,
    TrainingSetup,
    TrainingTask,
    check_metric,
)
from training.tasks.multiple_choice.files import ChoiceExample, choice_examples, read_choice_splits

# Of the passes of a step: its questions can be too many for the memory of one.
_TOKENS_A_PASS: Final = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceBatch(ExampleBatch):
    """A micro-batch with one prediction for each question.

    Attributes:
        num_choices: (Q,) of each question; `firsts` and `sizes` are those of all choices, (C,).
        targets: (Q,).
    """

    num_choices: Tensor


def collate_choices(
    examples: Sequence[ChoiceExample], tokenizer: AlbertTokenizer, *, row_length: int
) -> ChoiceBatch:
    """Pack the choices of questions, none longer than `row_length`, by best fit into rows."""
    sequences = [sequence for example in examples for sequence in example.sequences(tokenizer)]
    packed = collate_examples(MULTIPLE_CHOICE, sequences, row_length=row_length)
    values: dict[str, Any] = {field.name: getattr(packed, field.name) for field in fields(packed)}
    values |= {
        "counts": {MULTIPLE_CHOICE: len(examples)},
        "targets": torch.tensor([example.target for example in examples]),
    }
    return ChoiceBatch(
        **values, num_choices=torch.tensor([len(example.choices) for example in examples])
    )


class ChoiceBatches(Sequence[ChoiceBatch]):
    """Questions, in order, as micro-batches of a limited number of tokens, packed when read."""

    def __init__(
        self, examples: Sequence[ChoiceExample], tokenizer: AlbertTokenizer, *, row_length: int
    ) -> None:
        self._passes = list(_passes(examples))
        self._tokenizer = tokenizer
        self._row_length = row_length

    def __len__(self) -> int:
        return len(self._passes)

    def __getitem__(self, number: Any) -> Any:
        """Return one micro-batch, which is not kept."""
        return collate_choices(self._passes[number], self._tokenizer, row_length=self._row_length)


def _passes(examples: Sequence[ChoiceExample]) -> Iterator[list[ChoiceExample]]:
    """Yield questions that go through the model together; one that is over the limit alone."""
    passed: list[ChoiceExample] = []
    num_tokens = 0
    for example in examples:
        num_more = sum(example.lengths)
        if passed and num_tokens + num_more > _TOKENS_A_PASS:
            yield passed
            passed, num_tokens = [], 0
        passed.append(example)
        num_tokens += num_more
    if passed:
        yield passed


@dataclass(kw_only=True)
class _ChoiceStream(ExampleStream[ChoiceExample]):
    """Task stream over questions, `batch_size` a step in as many micro-batches as they need."""

    tokenizer: AlbertTokenizer

    def passes(self, examples: Sequence[ChoiceExample]) -> Sequence[Sequence[ChoiceExample]]:
        """Return questions in the parts that go through the model together."""
        return list(_passes(examples))

    def pack(self, examples: Sequence[ChoiceExample], row_length: int) -> MicroBatch:
        """Return questions as one micro-batch."""
        return collate_choices(examples, self.tokenizer, row_length=row_length)


def _stream(
    examples: Sequence[ChoiceExample], setup: TrainingSetup, batch_size: int
) -> _ChoiceStream:
    """Return the task stream of questions, packed into rows of the length that costs least."""
    steps = islice(shuffled_batches(len(examples), batch_size, setup.seed), NUM_SAMPLED_BATCHES)
    passes = [passed for step in steps for passed in _passes([examples[i] for i in step])]
    return _ChoiceStream(
        task=MULTIPLE_CHOICE,
        examples=examples,
        batch_size=batch_size,
        row_length=best_row_length(
            [np.concatenate([example.lengths for example in passed]) for passed in passes],
            longest=max(max(example.lengths) for example in examples),
            config=setup.architecture,
        ),
        seed=setup.seed,
        division=setup.division,
        tokenizer=setup.tokenizer,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceConfig:
    """The questions of a run with choices.

    Attributes:
        files, validation: files, or folders of them.
        columns: of the context, the question and the answer.
        choice_columns: of the choices; none for those that data sets commonly have.
        metric: figure that decides which validation is best; None for accuracy.
    """

    files: Sequence[Path]
    validation: Sequence[Path]
    columns: Columns
    choice_columns: Sequence[str]
    metric: str | None


def read_questions(config: ChoiceConfig, setup: TrainingSetup, batch_size: int) -> TrainingTask:
    """Read and tokenise the questions of the training and validation files."""
    check_metric(config.metric, ("accuracy", "loss"), "multiple choice")
    files = {TRAINING: labelled_files(config.files, "train", suffixes=CHOICES)}
    if config.validation:
        files[VALIDATION] = labelled_files(config.validation, "validation", suffixes=CHOICES)
    texts = read_choice_splits(files, config.columns, config.choice_columns)
    examples, long_texts = setup.tokenise(texts, choice_examples)
    return TrainingTask(
        name=MULTIPLE_CHOICE,
        streams=(_stream(examples[TRAINING], setup, batch_size),),
        losses={MULTIPLE_CHOICE: partial(choice_loss, logits=setup.compiled(cls_logits))},
        validation=_validation(examples.get(VALIDATION, ()), setup),
        figure=config.metric or "accuracy",
        long_texts=long_texts,
    )


def _validation(examples: Sequence[ChoiceExample], setup: TrainingSetup) -> Validation | None:
    """Return the validation on held-out questions, in batches of like lengths."""
    if not examples:
        return None
    ordered = sorted(examples, key=lambda example: max(example.lengths))
    batches = ChoiceBatches(ordered, setup.tokenizer, row_length=setup.row_length)
    return Validation(batches=batches, tasks=(MULTIPLE_CHOICE,))


def choice_loss(
    model: AlbertForTasks, batch: ChoiceBatch, logits: LogitsFunction = cls_logits
) -> dict[LossName, LossSums]:
    """Return the loss of multiple choice: cross-entropy over the choices of each question.

    Each choice has a logit, from its [CLS] row.
    """
    logits_C = logits(model, batch)[:, 0].float()
    places_K = torch.arange(int(batch.num_choices.max()), device=logits_C.device)
    is_choice_QK = places_K < batch.num_choices[:, None]
    missing_QK = torch.full(is_choice_QK.shape, -torch.inf, device=logits_C.device)
    logits_QK = missing_QK.masked_scatter(is_choice_QK, logits_C)
    return {MULTIPLE_CHOICE: cross_entropy(logits_QK, batch.targets, len(batch.targets))}
