"""Multiple choice in a finetuning run: its data, its loss, and validation on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from albert_serve.tokenizer import AlbertTokenizer
from training.data.choices import ChoiceBatches, ChoiceExample, choice_examples, choice_stream
from training.data.labelled.choices import read_choice_splits
from training.data.labelled.folders import CHOICES, labelled_files
from training.data.streams import TaskStream
from training.evaluation.validation import Validation
from training.finetuning.config import FinetuneConfig
from training.finetuning.data import (
    TRAINING,
    VALIDATION,
    LongTexts,
    check_metric,
    division_of,
    loss_function,
    tokenise,
)
from training.finetuning.start import Start
from training.loop.distributed import World
from training.losses import LossFunction
from training.model.heads import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class MultipleChoice:
    """Multiple choice in a run.

    Attributes:
        losses: the loss function, by the name of the stream's micro-batches.
        figure: of validation, that decides: `accuracy` or `loss`.
        held_out: examples of validation.
        long_texts: questions of training and validation of which a text is long.
    """

    name: ClassVar[Task] = "multiple-choice"
    streams: Sequence[TaskStream]
    losses: Mapping[str, LossFunction]
    tokenizer: AlbertTokenizer
    long_texts: LongTexts
    figure: str = "accuracy"
    held_out: Sequence[ChoiceExample] = ()

    @classmethod
    def read(cls, config: FinetuneConfig, start: Start, world: World, batch_size: int) -> Self:
        """Read and tokenise the questions of the training and validation files.

        Raises:
            CorpusError: files cannot be read, or hold what cannot be trained; all of it is listed.
            RunError: options do not fit the data.
        """
        check_metric(config.metric, ("accuracy", "loss"), "multiple choice")
        files = {TRAINING: labelled_files(config.multiple_choice, "train", suffixes=CHOICES)}
        if config.validation:
            held_out = labelled_files(config.validation, "validation", suffixes=CHOICES)
            files[VALIDATION] = held_out
        texts = read_choice_splits(files, config.columns, config.choice_columns)
        examples, long_texts = tokenise(texts, choice_examples, config, start.tokenizer)
        stream = choice_stream(
            examples[TRAINING],
            start.tokenizer,
            start.architecture,
            batch_size=batch_size,
            seed=config.seed,
            division=division_of(config, world),
        )
        return cls(
            streams=(stream,),
            losses={cls.name: loss_function(cls.name, start)},
            tokenizer=start.tokenizer,
            figure=config.metric or "accuracy",
            held_out=examples.get(VALIDATION, ()),
            long_texts=long_texts,
        )

    def validation(self, *, every: int, row_length: int) -> Validation:
        """Return the validation on the held-out questions, in batches of like lengths."""
        examples = sorted(self.held_out, key=lambda example: max(example.lengths))
        return Validation(
            batches=ChoiceBatches(examples, self.tokenizer, row_length=row_length),
            every=every,
            tasks=(self.name,),
        )
