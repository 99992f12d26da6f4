"""Text classification in a run: configuration, data, losses and validation.

Shape legend: C sequences, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from albert_serve.bundle.manifest import ProblemType
from albert_serve.errors import listed
from training.data.batch import ExampleBatch, LossName, TokenisedExample
from training.data.corpus import CorpusError
from training.data.labelled.cells import first_spellings
from training.data.labelled.columns import Columns
from training.errors import RunError
from training.glue.tasks import GlueTask
from training.loop.validation import Validation
from training.losses import LogitsFunction, LossFunction, LossSums, cls_logits, cross_entropy
from training.model.checkpoint import label_keys
from training.model.heads import AlbertForTasks, Task
from training.tasks.base import (
    TRAINING,
    VALIDATION,
    TrainingSetup,
    TrainingTask,
    hold_out,
    validation_batches,
)
from training.tasks.classification.files import (
    LabelledSplits,
    LabelledText,
    labelled_examples,
    read_splits,
    read_task,
)
from training.tasks.classification.metrics import ValidationMetrics
from training.tasks.metrics import OFFICIAL

# Maximum number of labels in a printed list.
_MAX_SHOWN: Final = 20
_MIN_TEXTS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassificationConfig:
    """The configuration of a classifier in a run.

    Attributes:
        head: name of the model's head.
        name: name of the classifier in the run's options, or None for the default classifier.
        files: files of labelled texts.
        validation: files of held-out texts.
        validation_split: fraction of the texts in `files` that is held out, or 0 for no split.
        task: GLUE task that determines columns and labels, or None for the user's own files.
        problem: type of the labels, or None for one label per text that does not look like a score.
        labels: names of the labels 0, 1, ..., or empty if the files determine them.
        class_weights: factors of the labels' losses, or `balanced`.
        metric: metric that selects the best checkpoint, or None for the official metrics.
    """

    head: Task
    name: str | None
    files: Sequence[Path]
    validation: Sequence[Path]
    validation_split: float
    task: GlueTask | None
    problem: ProblemType | None
    columns: Columns
    labels: Sequence[str]
    class_weights: Sequence[str | float]
    metric: str | None

    def read_splits(self) -> LabelledSplits:
        """Read the labelled texts of training and validation."""
        files = {TRAINING: self.files}
        if self.validation:
            files[VALIDATION] = self.validation
        if self.task is not None:
            splits = read_task(self.task, files)
        else:
            labels = first_spellings(self.labels) or None
            splits = read_splits(files, labels, self.columns, self.problem)
        return splits


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification(TrainingTask):
    """A text classifier of a run, with its data in memory.

    Attributes:
        head_name: name of the classifier in the run's options, or None for the default classifier.
        names: names of the labels.
        metrics: metrics of held-out texts.
        examples: training examples.
        class_weights: (K,) factors of the labels' losses.
    """

    head_name: str | None
    names: Sequence[str]
    metrics: ValidationMetrics
    examples: Sequence[TokenisedExample]
    class_weights: Tensor | None = None

    @property
    def problem(self) -> ProblemType:
        """The type of the labels."""
        return self.metrics.problem


def read_classification(
    config: ClassificationConfig, setup: TrainingSetup, batch_size: int
) -> Classification:
    """Read and tokenise the texts of a classifier's training and validation files."""
    problem = config.problem or "single_label_classification"
    splits = config.read_splits()
    if problem != "regression":
        _print_labels(config.name, splits)
    if config.validation_split:
        divided = hold_out(splits.texts[TRAINING], config.validation_split)
        splits = splits._replace(texts=divided)
    texts, names = splits.texts, splits.names
    if len(names) < 2 and problem != "regression":
        shown = ", ".join(names) or "none"
        raise CorpusError(f"A classifier needs two or more labels. All texts have {shown}.")
    weights = _class_weights(config.class_weights, texts[TRAINING], names, problem)
    examples, long_texts = setup.tokenise(texts, labelled_examples)
    metrics = ValidationMetrics(
        problem=problem,
        num_labels=len(names),
        official=OFFICIAL[problem] if config.task is None else config.task.metrics,
        metric=config.metric,
    )
    held_out = validation_batches(
        config.head, examples.get(VALIDATION, ()), row_length=setup.row_length
    )
    return Classification(
        name=config.head,
        head_name=config.name,
        names=names,
        examples=examples[TRAINING],
        metrics=metrics,
        class_weights=weights,
        streams=(setup.stream(config.head, examples[TRAINING], batch_size),),
        losses={config.head: _loss(problem, weights, setup.compiled(cls_logits))},
        validation=Validation(
            batches=held_out, tasks=(config.head,), metrics={config.head: metrics.calibrated}
        )
        if held_out
        else None,
        metric=metrics.best_metric,
        labels=label_keys(names, multi_label=problem == "multi_label_classification"),
        long_texts=long_texts,
    )


def _print_labels(head: str | None, splits: LabelledSplits) -> None:
    """Print the number of texts of each label, and labels with few texts, which may be typos."""
    texts, names = splits.texts[TRAINING], splits.names
    has_several = isinstance(texts[0].label, tuple)
    labels_NK = np.array([text.label for text in texts], np.int64)
    counts_K = labels_NK.sum(0) if has_several else np.bincount(labels_NK, minlength=len(names))
    counts = sorted(zip(counts_K.tolist(), names, strict=True), key=lambda pair: -pair[0])
    title = "label" if head is None else f"label of {head}"
    width = max(len(title), *(len(name) for _, name in counts[:_MAX_SHOWN]))
    print(f"{title:{width}}  {'texts':>7}    share")
    for count, name in counts[:_MAX_SHOWN]:
        print(f"{name:{width}}  {count:7,}  {100 * count / len(texts):5.1f} %")
    if len(names) > _MAX_SHOWN:
        print(f"... and {len(names) - _MAX_SHOWN:,} more labels")
    few = [f"{name} ({count})" for count, name in reversed(counts) if count < _MIN_TEXTS]
    if few:
        more = f", ... and {len(few) - _MAX_SHOWN:,} more" if len(few) > _MAX_SHOWN else ""
        print(f"labels with fewer than {_MIN_TEXTS} texts: {', '.join(few[:_MAX_SHOWN])}{more}")


def _loss(
    problem: ProblemType, class_weights: Tensor | None, logits: LogitsFunction
) -> LossFunction:
    """Return the loss function for the type of the labels."""
    if problem == "single_label_classification":
        return partial(classification_loss, logits=logits, class_weights=class_weights)
    if problem == "multi_label_classification":
        return partial(multi_label_loss, logits=logits)
    return partial(regression_loss, logits=logits)


def _class_weights(
    requested: Sequence[str | float],
    texts: Sequence[LabelledText],
    names: Sequence[str],
    problem: ProblemType,
) -> Tensor | None:
    """Return the weights (K,) of the labels, as `--class-weights` specifies them."""
    if not requested:
        return None
    if problem != "single_label_classification":
        raise RunError(f"--class-weights requires one label per text, not {problem}.")
    numbers = [weight for weight in requested if isinstance(weight, int | float)]
    if len(numbers) == len(requested) == len(names):
        return torch.tensor(numbers, dtype=torch.float32)
    if list(requested) != ["balanced"]:
        raise RunError(
            f"--class-weights {' '.join(map(str, requested))} does not match the labels. Use "
            f"`balanced`, or a number for each of the {len(names)} labels ({listed(names)})."
        )
    counts = np.bincount([text.label for text in texts], minlength=len(names))
    is_present = counts > 0
    weights = np.ones(len(names))
    weights[is_present] = len(texts) / (is_present.sum() * counts[is_present])
    return torch.from_numpy(weights).float()


def classification_loss(
    model: AlbertForTasks,
    batch: ExampleBatch,
    logits: LogitsFunction = cls_logits,
    class_weights: Tensor | None = None,
) -> dict[LossName, LossSums]:
    """Return the cross-entropy of one label per text.

    Args:
        class_weights: (K,) factors of the labels' losses. They are ignored for held-out texts.
    """
    logits_CK = logits(model, batch).float()
    result = cross_entropy(logits_CK, batch.targets, len(batch.targets))
    if class_weights is not None and model.training:
        loss = F.cross_entropy(
            logits_CK, batch.targets, class_weights.to(logits_CK.device), reduction="sum"
        )
        result = replace(result, loss=loss)
    return {batch.task: replace(result, logits=logits_CK, targets=batch.targets)}


def regression_loss(
    model: AlbertForTasks, batch: ExampleBatch, logits: LogitsFunction = cls_logits
) -> dict[LossName, LossSums]:
    """Return the squared errors of scores. A score is right if its error is less than 0.5."""
    logits_C1 = logits(model, batch).float()
    errors_C = logits_C1[:, 0] - batch.targets
    result = LossSums(
        loss=errors_C.square().sum(),
        right=(errors_C.abs() < 0.5).sum(),
        count=len(errors_C),
        logits=logits_C1,
        targets=batch.targets,
    )
    return {batch.task: result}


def multi_label_loss(
    model: AlbertForTasks, batch: ExampleBatch, logits: LogitsFunction = cls_logits
) -> dict[LossName, LossSums]:
    """Return the binary cross-entropy of several labels per text, as the mean over labels.

    A text counts as right if all of its labels are right. The targets (C, K) are 1 and 0.
    """
    logits_CK = logits(model, batch).float()
    losses_CK = F.binary_cross_entropy_with_logits(logits_CK, batch.targets, reduction="none")
    result = LossSums(
        loss=losses_CK.mean(-1).sum(),
        right=((logits_CK > 0) == (batch.targets > 0)).all(-1).sum(),
        count=len(logits_CK),
        logits=logits_CK,
        targets=batch.targets,
    )
    return {batch.task: result}
