"""Multiple choice in a run: configuration, micro-batches, loss and validation.

All choices of a question are in the same micro-batch.

Shape legend: C sequences (one for each choice), Q questions, K choices of a question.
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

# Maximum number of tokens in a forward pass, because a step's questions may not fit in memory.
_MAX_PASS_TOKENS: Final = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceBatch(ExampleBatch):
    """A micro-batch with one prediction for each question.

    Attributes:
        num_choices: (Q,) number of choices of each question. `firsts` and `sizes` are (C,).
        targets: (Q,) index of the right choice.
    """

    num_choices: Tensor


def collate_choices(
    examples: Sequence[ChoiceExample], tokenizer: AlbertTokenizer, *, row_length: int
) -> ChoiceBatch:
    """Pack the choices of questions, each of at most `row_length` tokens, into rows."""
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
    """The micro-batches of questions in order, each packed when it is read."""

    def __init__(
        self, examples: Sequence[ChoiceExample], tokenizer: AlbertTokenizer, *, row_length: int
    ) -> None:
        self._passes = list(_passes(examples))
        self._tokenizer = tokenizer
        self._row_length = row_length

    def __len__(self) -> int:
        return len(self._passes)

    def __getitem__(self, number: Any) -> Any:
        """Pack a micro-batch, without storing it."""
        return collate_choices(self._passes[number], self._tokenizer, row_length=self._row_length)


def _passes(examples: Sequence[ChoiceExample]) -> Iterator[list[ChoiceExample]]:
    """Yield the questions of each forward pass. A question over the token limit is alone."""
    batch: list[ChoiceExample] = []
    num_tokens = 0
    for example in examples:
        size = sum(example.lengths)
        if batch and num_tokens + size > _MAX_PASS_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch.append(example)
        num_tokens += size
    if batch:
        yield batch


@dataclass(kw_only=True)
class _ChoiceStream(ExampleStream[ChoiceExample]):
    """The task stream of questions: `batch_size` per step, in as many micro-batches as needed."""

    tokenizer: AlbertTokenizer

    def passes(self, examples: Sequence[ChoiceExample]) -> Sequence[Sequence[ChoiceExample]]:
        """Return the questions of each forward pass."""
        return list(_passes(examples))

    def pack(self, examples: Sequence[ChoiceExample], row_length: int) -> MicroBatch:
        """Pack questions into one micro-batch."""
        return collate_choices(examples, self.tokenizer, row_length=row_length)


def _stream(
    examples: Sequence[ChoiceExample], setup: TrainingSetup, batch_size: int
) -> _ChoiceStream:
    """Return the task stream of questions, packed into rows of the length that costs least."""
    steps = islice(shuffled_batches(len(examples), batch_size, setup.seed), NUM_SAMPLED_BATCHES)
    passes = [batch for step in steps for batch in _passes([examples[i] for i in step])]
    return _ChoiceStream(
        task=MULTIPLE_CHOICE,
        examples=examples,
        batch_size=batch_size,
        row_length=best_row_length(
            [np.concatenate([example.lengths for example in batch]) for batch in passes],
            longest=max(max(example.lengths) for example in examples),
            config=setup.architecture,
        ),
        seed=setup.seed,
        division=setup.division,
        tokenizer=setup.tokenizer,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceConfig:
    """The configuration of multiple choice in a run.

    Attributes:
        files, validation: files or folders of questions.
        columns: columns of the context, the question and the answer.
        choice_columns: columns of the choices, or empty for the common names.
        metric: metric that selects the best checkpoint, or None for accuracy.
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
        metric=config.metric or "accuracy",
        long_texts=long_texts,
    )


def _validation(examples: Sequence[ChoiceExample], setup: TrainingSetup) -> Validation | None:
    """Return the validation on held-out questions, in batches of similar lengths."""
    if not examples:
        return None
    ordered = sorted(examples, key=lambda example: max(example.lengths))
    batches = ChoiceBatches(ordered, setup.tokenizer, row_length=setup.row_length)
    return Validation(batches=batches, tasks=(MULTIPLE_CHOICE,))


def choice_loss(
    model: AlbertForTasks, batch: ChoiceBatch, logits: LogitsFunction = cls_logits
) -> dict[LossName, LossSums]:
    """Return the cross-entropy over the choices of each question."""
    logits_C = logits(model, batch)[:, 0].float()
    indices_K = torch.arange(int(batch.num_choices.max()), device=logits_C.device)
    is_choice_QK = indices_K < batch.num_choices[:, None]
    missing_QK = torch.full(is_choice_QK.shape, -torch.inf, device=logits_C.device)
    logits_QK = missing_QK.masked_scatter(is_choice_QK, logits_C)
    return {MULTIPLE_CHOICE: cross_entropy(logits_QK, batch.targets, len(batch.targets))}
