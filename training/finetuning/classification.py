"""Text classification of a finetuning run: its examples, its loss, and validation on it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from albert_serve.bundle.manifest import ProblemType
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import TokenisedExample
from training.data.collate import collate_examples
from training.data.corpus import CorpusError
from training.data.feeds import LabelledExample, labelled_examples
from training.data.labelled.texts import LabelledSplits, LabelledText, read_splits, read_texts
from training.evaluation.metrics import (
    COMBINED,
    OFFICIAL,
    chance_level,
    mean_metric,
    metric_figures,
)
from training.evaluation.validation import Validation
from training.finetuning.examples import tokenise_splits
from training.finetuning.seeds import prepared_folder
from training.glue.files import read_task
from training.glue.tasks import TASKS, Metric
from training.loop.distributed import World
from training.loop.progress import RunError
from training.loop.selection import Selection
from training.losses import (
    LogitsFunction,
    LossFunction,
    adaptive_scores,
    classification_scores,
    cls_logits,
    compile_logits,
    exit_logits,
    multi_label_scores,
    regression_scores,
)
from training.model.checkpoint import label_keys
from training.model.heads import Task
from training.run.options import columns_of
from training.system.precision import PrecisionName

_TRAINING: Final = "training"
_VALIDATION: Final = "validation"
# Texts of a batch of validation.
_VALIDATED_TOGETHER: Final = 64
# The metrics that `--metric` can name.
_ALLOWED: Final[Mapping[ProblemType, tuple[Metric, ...]]] = MappingProxyType(
    {
        "single_label_classification": ("accuracy", "macro_f1", "matthews_correlation"),
        "multi_label_classification": ("micro_f1", "macro_f1", "subset_accuracy"),
        "regression": ("pearson", "spearman", "mse"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """The data and the loss of a classifier of texts in a run.

    Attributes:
        task: its head in the model.
        labels: keys of `config.json` that name the labels.
        held_out: examples of validation.
        metrics: of validation, the official ones first.
        num_official: how many of the metrics decide, by their mean, which validation is best.
        problem: the kind of the task.
        metric: the figure that decides in their place.
    """

    task: Task
    examples: Sequence[TokenisedExample]
    labels: dict[str, Any]
    loss: LossFunction
    held_out: Sequence[LabelledExample] = ()
    metrics: tuple[Metric, ...] = ("accuracy",)
    num_official: int = 1
    problem: ProblemType = "single_label_classification"
    metric: str | None = None

    def validation(self, *, every: int, row_length: int) -> Validation:
        """Return the validation on the held-out texts, in batches of like lengths."""
        examples = sorted(self.held_out, key=lambda example: len(example.ids))
        return Validation(
            batches=[
                collate_examples(
                    self.task,
                    examples[begin : begin + _VALIDATED_TOGETHER],
                    row_length=row_length,
                )
                for begin in range(0, len(examples), _VALIDATED_TOGETHER)
            ],
            every=every,
            tasks=(self.task,),
            metrics={self.task: self.figures},
        )

    def selection(self, options: argparse.Namespace) -> Selection:
        """Return the selection of the best validation by the deciding figure."""
        return Selection(figure=self.figure, chance=self.chance, patience=options.patience)

    @property
    def figure(self) -> str:
        """The figure that decides: that of `--metric`, or the official metrics."""
        return self.metric or (self.metrics[0] if self.num_official == 1 else COMBINED)

    @property
    def chance(self) -> float:
        """The deciding figure of constant answers to the held-out texts."""
        targets = np.array([example.label for example in self.held_out])
        num_labels = len(self.labels["id2label"])
        return chance_level(self.figure, targets, num_labels, self.problem, self.figures)

    def figures(self, logits_NK: Tensor, targets_N: Tensor) -> dict[str, float]:
        """Return the metrics of logits (N, K), and the mean of the official ones."""
        figures = metric_figures(self.metrics, logits_NK.numpy(), targets_N.numpy())
        official: dict[str, float] = {
            metric: figures[metric] for metric in self.metrics[: self.num_official]
        }
        return figures if len(official) == 1 else {**figures, COMBINED: mean_metric(official)}


def build_classification(
    task: Task,
    options: argparse.Namespace,
    tokenizer: AlbertTokenizer,
    precision: PrecisionName,
    world: World,
    *,
    compiles: bool,
) -> Classification:
    """Read and tokenise the texts of the training and validation files.

    Args:
        task: the classifier's head in the model.
        compiles: whether the model's pass is compiled.

    Raises:
        CorpusError: files cannot be read, or hold what cannot be trained; all of it is listed.
        RunError: options do not fit the data.
    """
    problem = problem_of(options)
    _check_adaptive_depth(options, problem)
    logits: LogitsFunction = exit_logits if options.adaptive_depth else cls_logits
    logits = compile_logits(logits) if compiles else logits
    if options.teacher is not None:
        return _taught(task, options, tokenizer, precision, world, logits)
    errors: list[str] = []
    splits = _read(options, errors)
    tokenise_all = partial(
        tokenise_splits, options, tokenizer, splits.texts, labelled_examples, "texts"
    )
    if errors:
        tokenise_all(errors)  # raises them, with those of long texts
    if len(splits.names) < 2 and problem != "regression":
        shown = ", ".join(splits.names) or "none"
        raise CorpusError(f"all texts have the label {shown}; a classifier needs two or more")
    of_glue = TASKS.get(options.task)
    official = OFFICIAL[problem] if of_glue is None else of_glue.metrics
    metrics = _metrics(options.metric, official, problem, len(splits.names))
    texts = splits.texts[_TRAINING]
    weights = _class_weights(options.class_weights, texts, splits.names, problem)
    examples = tokenise_all()
    return Classification(
        task=task,
        examples=examples[_TRAINING],
        labels=label_keys(splits.names, multi_label=problem == "multi_label_classification"),
        loss=_loss(problem, logits, weights, is_adaptive=options.adaptive_depth),
        held_out=examples.get(_VALIDATION, ()),
        metrics=metrics,
        num_official=len(official),
        problem=problem,
        metric=options.metric,
    )


def _loss(
    problem: ProblemType,
    logits: LogitsFunction,
    class_weights: Tensor | None = None,
    *,
    is_adaptive: bool = False,
) -> LossFunction:
    """Return the loss function of labelled texts."""
    single = adaptive_scores if is_adaptive else classification_scores
    losses: dict[ProblemType, LossFunction] = {
        "single_label_classification": partial(single, logits=logits, class_weights=class_weights),
        "multi_label_classification": partial(multi_label_scores, logits=logits),
        "regression": partial(regression_scores, logits=logits),
    }
    return losses[problem]


def problem_of(options: argparse.Namespace) -> ProblemType:
    """Return the kind of the task: as --task or --problem-type says, or as the columns tell."""
    if options.task is not None:
        return TASKS[options.task].problem
    asked: ProblemType | None = options.problem_type
    if asked is None and columns_of(options).has_several_labels:
        return "multi_label_classification"
    return asked or "single_label_classification"


def _check_adaptive_depth(options: argparse.Namespace, problem: ProblemType) -> None:
    """Check that `--adaptive-depth` goes with the data.

    Raises:
        RunError: it does not.
    """
    if not options.adaptive_depth:
        return
    if options.teacher is not None:
        raise RunError("--adaptive-depth goes with labelled texts, not with --teacher")
    if problem != "single_label_classification":
        raise RunError(f"--adaptive-depth goes with one label a text; this is {problem}")


def _read(options: argparse.Namespace, errors: list[str]) -> LabelledSplits:
    """Read the files, and append their errors."""
    files = {_TRAINING: options.text_classification}
    if options.validation:
        files[_VALIDATION] = options.validation
    if options.task is not None:
        return read_task(TASKS[options.task], files, errors)
    return read_splits(
        files, options.labels, columns_of(options), problem_of(options), errors=errors
    )


def _metrics(
    asked: str | None, official: tuple[Metric, ...], problem: ProblemType, num_labels: int
) -> tuple[Metric, ...]:
    """Return the metrics of validation, the official ones first.

    Raises:
        RunError: `--metric` is none of these labels.
    """
    allowed = _ALLOWED[problem]
    has_one_label = problem == "single_label_classification"
    if has_one_label and num_labels == 2:
        allowed = (*allowed, "f1")
    if asked in (None, "loss"):
        return official
    chosen = [metric for metric in allowed if metric == asked]
    if not chosen:
        what = f"{num_labels} labels" if has_one_label else problem
        raise RunError(f"--metric {asked} is none of {what}; take {', '.join(allowed)} or loss")
    return (*official, *(metric for metric in chosen if metric not in official))


def _class_weights(
    asked: Sequence[str | float] | None,
    texts: Sequence[LabelledText],
    names: Sequence[str],
    problem: ProblemType,
) -> Tensor | None:
    """Return the weights (K,) of the labels that `--class-weights` asks for.

    Raises:
        RunError: there is not one for each label, or texts do not have one label each.
    """
    if asked is None:
        return None
    if problem != "single_label_classification":
        raise RunError(f"--class-weights goes with one label a text; this is {problem}")
    numbers = [weight for weight in asked if isinstance(weight, int | float)]
    if len(numbers) == len(asked) == len(names):
        return torch.tensor(numbers, dtype=torch.float32)
    if list(asked) != ["balanced"]:
        raise RunError(
            f"--class-weights {' '.join(map(str, asked))}: give `balanced`, or one number for "
            f"each of {len(names)} labels ({', '.join(names)})"
        )
    labels = np.array([text.label for text in texts])
    present = np.unique(labels)
    weights = np.ones(len(names))
    from sklearn.utils.class_weight import compute_class_weight  # its import takes a second

    weights[present] = compute_class_weight("balanced", classes=present, y=labels)
    return torch.from_numpy(weights).float()


def _taught(
    task: Task,
    options: argparse.Namespace,
    tokenizer: AlbertTokenizer,
    precision: PrecisionName,
    world: World,
    logits: LogitsFunction,
) -> Classification:
    """Return the same of texts with a teacher's logits as labels."""
    # Imported here, since only a teacher needs transformers.
    from training.distillation.pseudo_labels import (
        PseudoLabelLoss,
        TaskTeacher,
        pseudo_label,
        pseudo_labelled_examples,
    )

    _check_teacher(options)
    texts = read_texts(options.text_classification, columns_of(options))
    teacher = TaskTeacher.load(options.teacher, world.device)
    official = OFFICIAL[teacher.problem]
    metrics = _metrics(options.metric, official, teacher.problem, len(teacher.names))
    held_out: Mapping[str, Sequence[LabelledExample]] = {}
    if options.validation:
        splits = read_splits(
            {_VALIDATION: options.validation}, teacher.names, columns_of(options), teacher.problem
        )
        held_out = tokenise_splits(options, tokenizer, splits.texts, labelled_examples, "texts")
    logits_NK = pseudo_label(texts, teacher, world, prepared_folder(options), precision)
    return Classification(
        task=task,
        examples=pseudo_labelled_examples(texts, logits_NK, tokenizer, length=options.length),
        labels=label_keys(
            teacher.names, multi_label=teacher.problem == "multi_label_classification"
        ),
        loss=PseudoLabelLoss(
            problem=teacher.problem,
            temperature=options.temperature,
            held_out=_loss(teacher.problem, logits),
            logits=logits,
        ),
        held_out=held_out.get(_VALIDATION, ()),
        metrics=metrics,
        num_official=len(official),
        problem=teacher.problem,
        metric=options.metric,
    )


def _check_teacher(options: argparse.Namespace) -> None:
    """Refuse options of labelled texts.

    Raises:
        RunError: there are some.
    """
    if options.labels:
        raise RunError("--labels goes with labelled texts; with --teacher the labels are its own")
    if options.problem_type:
        raise RunError("--problem-type goes with labelled texts, not with --teacher")
    if options.class_weights:
        raise RunError("--class-weights goes with labelled texts, not with --teacher")
    if not options.truncation:
        raise RunError("--no-truncation goes with labelled texts, not with --teacher")


def check_validation(options: argparse.Namespace) -> None:
    """Check that validation and its options go with the data.

    Raises:
        RunError: they do not.
    """
    is_measured = (
        options.text_classification or options.multiple_choice or options.question_answering
    )
    if options.validation and not is_measured:
        raise RunError(
            "--validation takes labelled data; it goes with --text-classification, "
            "--multiple-choice or --question-answering"
        )
    has_default = options.text_classification or options.multiple_choice
    if options.validation and options.heads and not has_default:
        raise RunError(
            "--validation before --head is of the default classifier, which has no data here; "
            "questions are validated only without classifiers: give it after --head"
        )
    everywhere = (options, *options.heads)
    if options.patience is not None and not any(each.validation for each in everywhere):
        raise RunError("--patience goes with --validation")
    if any(each.metric is not None and not each.validation for each in everywhere):
        raise RunError("--metric goes with --validation")
