"""The task streams of a finetuning run: its data, their batch sizes and weights, and the losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from training.data.batch import TokenisedExample
from training.data.choices import choice_stream
from training.data.labelled.errors import collecting, raise_listed
from training.data.streams import ExampleStream, TaskStream, example_stream
from training.errors import EvaluationError
from training.finetuning.choices import ChoiceData, build_choices
from training.finetuning.classification import ClassificationData, build_classification
from training.finetuning.data import DataContext
from training.finetuning.embeddings import TASK as EMBEDDINGS
from training.finetuning.embeddings import EmbeddingData, build_embeddings
from training.finetuning.model import ClassifierHead
from training.finetuning.pretraining import pretraining_streams
from training.finetuning.questions import (
    QuestionData,
    build_held_out_questions,
    question_examples,
)
from training.finetuning.settings import FinetuneSettings
from training.loop.progress import RunError
from training.losses import LOSS_OF, LossFunction, compiled_losses
from training.order_losses import order_loss

# The data of a task that may be validated.
TaskData: TypeAlias = ClassificationData | ChoiceData | QuestionData | EmbeddingData
# The passes of a run whose end is not given: so many steps of them.
_STEPS: Final = 1500
_MIN_EPOCHS: Final = 3
_MAX_EPOCHS: Final = 20
# Of several tasks.
_VALIDATE_EVERY: Final = 500
# The data of other tasks than classifiers', in the order of --weights and --batch-size.
_OTHERS: Final = ("multiple_choice", "question_answering", "embeddings", "pretraining")


@dataclass(kw_only=True)
class Streams:
    """The data of all tasks of a run, which `read` reads.

    Attributes:
        placed: the classifiers.
        task_streams: the task streams, in the order of --weights.
        datasets: those that may have held-out data.
    """

    context: DataContext
    placed: Sequence[ClassifierHead]
    task_streams: list[TaskStream] = field(default_factory=list)
    datasets: list[TaskData] = field(default_factory=list)

    @property
    def settings(self) -> FinetuneSettings:
        """The settings of the run."""
        return self.context.settings

    def read(self) -> None:
        """Read the data of all tasks.

        Raises:
            CorpusError: data is broken; all of it is listed.
            RunError: there is none, or options do not go together.
        """
        settings = self.settings
        sizes = self._batch_sizes()
        errors: list[str] = []  # of all data, to be listed at once
        for task, size in sizes.items():
            if task != "pretraining":
                with collecting(errors):
                    self.task_streams.append(self._read_task(task, size))
        has_others = bool(self.placed or settings.multiple_choice)
        if settings.question_answering and settings.validation and not has_others:
            with collecting(errors, EvaluationError):
                self.datasets.append(build_held_out_questions(self.context))
        raise_listed(errors)
        if "pretraining" in sizes:  # the last, since text takes long to prepare
            self.task_streams.extend(pretraining_streams(self.context, sizes["pretraining"]))
        if not self.task_streams:
            raise RunError(
                "nothing to train: give --text-classification, --multiple-choice, --task, --head, "
                "--question-answering, --embeddings or --pretraining"
            )

    def _batch_sizes(self) -> dict[str, int]:
        """Return the examples a step of each task stream by its name, in the order of --weights."""
        others = [name for name in _OTHERS if getattr(self.settings, name)]
        names = [each.task for each in self.placed] + [name.replace("_", "-") for name in others]
        sizes = self.settings.batch_size
        if len(sizes) not in (1, len(names)):
            raise RunError(
                f"--batch-size {' '.join(map(str, sizes))}: give one number, or one for each of "
                + ", ".join(names)
            )
        return dict(zip(names, sizes * len(names) if len(sizes) == 1 else sizes, strict=True))

    def _read_task(self, task: str, size: int) -> TaskStream:
        """Return the task stream of labelled data, and keep what may be validated."""
        context = self.context
        architecture, tokenizer = context.architecture, context.tokenizer
        seed, division = self.settings.seed, context.division
        if task == "multiple-choice":
            choices = build_choices(context)
            self.datasets.append(choices)
            return choice_stream(
                choices.examples,
                tokenizer,
                architecture,
                batch_size=size,
                seed=seed,
                division=division,
            )
        if task == EMBEDDINGS:
            vectors = build_embeddings(context)
            self.datasets.append(vectors)
            return vectors.stream(context, size)
        if task == "question-answering":
            length = self.settings.window_length(architecture.max_positions)
            files = self.settings.question_answering
            examples: Sequence[TokenisedExample] = question_examples(
                files, tokenizer, length=length
            )
        else:
            (config,) = (each.config for each in self.placed if each.task == task)
            texts = build_classification(task, config, context)
            self.datasets.append(texts)
            examples = texts.examples
        return example_stream(
            task, examples, architecture, batch_size=size, seed=seed, division=division
        )

    @property
    def loss_of(self) -> Mapping[str, LossFunction]:
        """The loss function of each micro-batch's task."""
        loss_of = compiled_losses() if self.context.compiles else dict(LOSS_OF)
        loss_of |= {each.task: each.loss for each in self.classifications}
        loss_of |= {
            each.task: each.loss for each in self.datasets if isinstance(each, EmbeddingData)
        }
        if self.settings.order_share:
            loss_of["sentence-order"] = order_loss(compiles=self.context.compiles)
        return loss_of

    @property
    def classifications(self) -> list[ClassificationData]:
        """The data of the classifiers."""
        return [each for each in self.datasets if isinstance(each, ClassificationData)]

    @property
    def weights(self) -> list[float]:
        """The weight of each task stream; those of pretraining share one by --order-share.

        Raises:
            RunError: there is another number of --weights.
        """
        share = self.settings.order_share
        names = [stream.name for stream in self.task_streams][: -1 if share else None]
        weights = list(self.settings.weights) or [1.0] * len(names)
        if len(weights) != len(names):
            raise RunError(f"--weights {weights}: give one for each of {', '.join(names)}")
        if not share:
            return weights
        *others, pretraining = weights
        return [*others, pretraining * (1 - share), pretraining * share]

    @property
    def num_steps(self) -> int | None:
        """The steps of the run by --steps and --epochs; None if its budget alone ends it."""
        steps, epochs = self.settings.steps, self.settings.epochs
        if self.settings.head_only:
            return 0
        if not epochs and (steps or self.settings.budget):
            return steps
        an_epoch = self.steps_an_epoch
        epochs = epochs or max(_MIN_EPOCHS, min(_MAX_EPOCHS, round(_STEPS / an_epoch)))
        in_epochs = math.ceil(epochs * an_epoch)
        return min(in_epochs, steps or in_epochs)

    @property
    def validation_interval(self) -> int:
        """The steps between validations: by default an epoch."""
        if self.settings.validate_every is not None:
            return self.settings.validate_every
        match self.task_streams:
            case [ExampleStream() as stream]:
                return stream.steps_an_epoch
        return _VALIDATE_EVERY

    @property
    def steps_an_epoch(self) -> int:
        """The steps in which the one task's examples are read once.

        Raises:
            RunError: there are several tasks.
        """
        match self.task_streams:
            case [ExampleStream() as stream]:
                return stream.steps_an_epoch
        raise RunError("epochs are those of one task; with several give --steps or --budget")
