"""Text classification in a finetuning run: its data, its loss, and validation on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from albert_serve.bundle.manifest import ProblemType
from albert_serve.names import listed
from training.data.batch import TokenisedExample
from training.data.corpus import CorpusError
from training.data.labelled.label_names import first_spellings
from training.data.labelled.texts import LabelledSplits, LabelledText, read_splits
from training.data.streams import ExampleStream, example_stream, labelled_examples
from training.errors import RunError
from training.evaluation.calibration import calibration_figures
from training.evaluation.metrics import (
    COMBINED,
    OFFICIAL,
    mean_metric,
    metric_figures,
)
from training.evaluation.validation import Validation
from training.finetuning.config import ClassifierConfig, FinetuneConfig
from training.finetuning.data import (
    TRAINING,
    VALIDATION,
    LongTexts,
    check_metric,
    division_of,
    hold_out,
    tokenise,
    validation_batches,
)
from training.finetuning.start import Start
from training.glue.files import read_task
from training.glue.tasks import TASKS, Metric
from training.loop.distributed import World
from training.losses import (
    LossFunction,
    classification_loss,
    cls_logits,
    compile_logits,
    multi_label_loss,
    regression_loss,
)
from training.model.checkpoint import label_keys
from training.model.heads import Task

# Labels that are printed, of those with most texts and of those with few.
_MAX_SHOWN: Final = 20
_FEW: Final = 5
# The metrics that `--metric` can name.
_ALLOWED: Final[Mapping[ProblemType, tuple[Metric, ...]]] = MappingProxyType(
    {
        "single_label_classification": ("accuracy", "macro_f1", "matthews_correlation"),
        "multi_label_classification": ("micro_f1", "macro_f1", "subset_accuracy"),
        "regression": ("pearson", "spearman", "mse"),
    }
)


class ClassifierHead(NamedTuple):
    """A classifier of a run: its head in the model, and the configuration of its data."""

    task: Task
    config: ClassifierConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """A classifier of texts in a run.

    Attributes:
        head: its head in the model, and the configuration of its data.
        names: of its labels.
        official: the metrics whose mean decides which validation is best.
        metric: the figure that decides in their place.
        streams: its task stream.
        loss: the loss function of its micro-batches.
        class_weights: (K,) factors of the labels' losses.
        held_out: examples of validation.
        long_texts: those of training and validation.
    """

    head: ClassifierHead
    problem: ProblemType
    names: Sequence[str]
    official: tuple[Metric, ...]
    metric: str | None
    streams: Sequence[ExampleStream[TokenisedExample]]
    held_out: Sequence[TokenisedExample]
    long_texts: LongTexts
    loss: LossFunction
    class_weights: Tensor | None = None

    @classmethod
    def read(
        cls,
        head: ClassifierHead,
        config: FinetuneConfig,
        start: Start,
        world: World,
        batch_size: int,
    ) -> Self:
        """Read and tokenise the texts of a classifier's training and validation files.

        Raises:
            CorpusError: files cannot be read, or hold what cannot be trained; all of it is listed.
            RunError: options do not fit the data.
        """
        data = _read_labelled(head.config, config, start)
        stream = example_stream(
            head.task,
            data.pop("examples"),
            start.architecture,
            batch_size=batch_size,
            seed=config.seed,
            division=division_of(config, world),
        )
        return cls(head=head, metric=head.config.metric, streams=(stream,), **data)

    def __post_init__(self) -> None:
        """Check that `--metric` is one of these labels."""
        is_single = self.problem == "single_label_classification"
        what = f"{len(self.names)} labels" if is_single else self.problem
        check_metric(self.metric, (*self._allowed, "loss"), what)

    @property
    def _allowed(self) -> tuple[Metric, ...]:
        is_binary = self.problem == "single_label_classification" and len(self.names) == 2
        return (*_ALLOWED[self.problem], "f1") if is_binary else _ALLOWED[self.problem]

    @property
    def name(self) -> Task:
        """The name of its head in the model."""
        return self.head.task

    @property
    def losses(self) -> dict[str, LossFunction]:
        """The loss function, by the name of the stream's micro-batches."""
        return {self.name: self.loss}

    @property
    def examples(self) -> Sequence[TokenisedExample]:
        """The examples of training."""
        return self.streams[0].examples

    @property
    def labels(self) -> dict[str, Any]:
        """The keys of `config.json` that name the labels."""
        is_multi_label = self.problem == "multi_label_classification"
        return label_keys(self.names, multi_label=is_multi_label)

    def validation(self, *, every: int, row_length: int) -> Validation:
        """Return the validation on the held-out texts, in batches of like lengths."""
        return Validation(
            batches=validation_batches(self.name, self.held_out, row_length=row_length),
            every=every,
            tasks=(self.name,),
            metrics={self.name: self._calibrated_figures},
        )

    def _calibrated_figures(self, logits_NK: Tensor, targets_N: Tensor) -> dict[str, float]:
        figures = self.figures(logits_NK, targets_N)
        if self.problem != "regression":
            figures |= calibration_figures(logits_NK.float(), targets_N)
        return figures

    @property
    def figure(self) -> str:
        """The figure that decides: `--metric`'s, or the official metrics."""
        return self.metric or (self.official[0] if len(self.official) == 1 else COMBINED)

    def figures(self, logits_NK: Tensor, targets_N: Tensor) -> dict[str, float]:
        """Return the metrics of logits (N, K), and the mean of the official ones.

        Macro-F1 is always among those of labels, since accuracy hides rare ones.
        """
        asked = (each for each in self._allowed if each in ("macro_f1", self.metric))
        metrics = tuple(dict.fromkeys((*self.official, *asked)))
        figures = metric_figures(metrics, logits_NK.numpy(), targets_N.numpy())
        if len(self.official) == 1:
            return figures
        return {**figures, COMBINED: mean_metric({each: figures[each] for each in self.official})}


def _read_labelled(texts: ClassifierConfig, config: FinetuneConfig, start: Start) -> dict[str, Any]:
    """Return the examples and the fields of `Classification` of labelled texts."""
    problem = texts.problem
    splits = _read(texts)
    if problem != "regression":
        _print_labels(texts.head, splits)
    if config.splits_validation:
        divided = hold_out(splits.texts[TRAINING], config.validation_split)
        splits = LabelledSplits(divided, splits.names)
    if len(splits.names) < 2 and problem != "regression":
        shown = ", ".join(splits.names) or "none"
        raise CorpusError(f"all texts have the label {shown}; a classifier needs two or more")
    weights = _class_weights(texts.class_weights, splits.texts[TRAINING], splits.names, problem)
    examples, long_texts = tokenise(splits.texts, labelled_examples, config, start.tokenizer)
    return {
        "problem": problem,
        "names": splits.names,
        "official": OFFICIAL[problem] if texts.task is None else TASKS[texts.task].metrics,
        "examples": examples[TRAINING],
        "held_out": examples.get(VALIDATION, ()),
        "long_texts": long_texts,
        "loss": _loss(problem, weights, compiles=start.compiles),
        "class_weights": weights,
    }


def _read(config: ClassifierConfig) -> LabelledSplits:
    files = {TRAINING: config.text_classification}
    if config.validation:
        files[VALIDATION] = config.validation
    if config.task is not None:
        return read_task(TASKS[config.task], files)
    # If both are open, many different numbers as labels are an error that asks.
    problem = config.problem if config.columns.has_several_labels else config.problem_type
    return read_splits(files, first_spellings(config.labels) or None, config.columns, problem)


def _print_labels(head: str | None, splits: LabelledSplits) -> None:
    """Print the number of texts of each label, and the labels with few, which may be typos."""
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
    few = [f"{name} ({count})" for count, name in reversed(counts) if count < _FEW]
    if few:
        more = f", ... and {len(few) - _MAX_SHOWN:,} more" if len(few) > _MAX_SHOWN else ""
        print(f"labels with fewer than {_FEW} texts: {', '.join(few[:_MAX_SHOWN])}{more}")


def _loss(problem: ProblemType, class_weights: Tensor | None, *, compiles: bool) -> LossFunction:
    """Return the loss function of labelled texts."""
    logits = compile_logits(cls_logits) if compiles else cls_logits
    losses: dict[ProblemType, LossFunction] = {
        "single_label_classification": partial(
            classification_loss, logits=logits, class_weights=class_weights
        ),
        "multi_label_classification": partial(multi_label_loss, logits=logits),
        "regression": partial(regression_loss, logits=logits),
    }
    return losses[problem]


def _class_weights(
    asked: Sequence[str | float],
    texts: Sequence[LabelledText],
    names: Sequence[str],
    problem: ProblemType,
) -> Tensor | None:
    """Return the weights (K,) of the labels that `--class-weights` asks for.

    Raises:
        RunError: there is not one for each label, or texts do not have one label each.
    """
    if not asked:
        return None
    if problem != "single_label_classification":
        raise RunError(f"--class-weights requires one label per text; this is {problem}")
    numbers = [weight for weight in asked if isinstance(weight, int | float)]
    if len(numbers) == len(asked) == len(names):
        return torch.tensor(numbers, dtype=torch.float32)
    if list(asked) != ["balanced"]:
        raise RunError(
            f"--class-weights {' '.join(map(str, asked))}: give `balanced`, or one number for "
            f"each of {len(names)} labels ({listed(names)})"
        )
    counts = np.bincount([text.label for text in texts], minlength=len(names))
    present = counts > 0
    weights = np.ones(len(names))
    weights[present] = len(texts) / (present.sum() * counts[present])
    return torch.from_numpy(weights).float()
