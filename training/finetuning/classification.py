"""Text classification of a finetuning run: its examples, its loss, and validation on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from albert_serve.bundle.manifest import ProblemType
from albert_serve.bundle.weights import CLASSIFICATION
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
from training.finetuning.config import ClassifierConfig
from training.finetuning.examples import (
    TRAINING,
    VALIDATED_TOGETHER,
    VALIDATION,
    tokenise_splits,
)
from training.finetuning.settings import FinetuneSettings
from training.glue.files import read_task
from training.glue.tasks import TASKS, Metric
from training.loop.distributed import World
from training.loop.progress import RunError
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
from training.run.flags import flag_name
from training.system.precision import PrecisionName

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
                    examples[begin : begin + VALIDATED_TOGETHER],
                    row_length=row_length,
                )
                for begin in range(0, len(examples), VALIDATED_TOGETHER)
            ],
            every=every,
            tasks=(self.task,),
            metrics={self.task: self.figures},
        )

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierBuilder:
    """Reads and tokenises the data of a classifier of texts.

    Attributes:
        task: the classifier's head in the model.
        config: of its data.
        compiles: whether the model's pass is compiled.
    """

    task: Task
    config: ClassifierConfig
    settings: FinetuneSettings
    tokenizer: AlbertTokenizer
    precision: PrecisionName
    world: World
    compiles: bool

    def build(self) -> Classification:
        """Read and tokenise the texts of the training and validation files.

        Raises:
            CorpusError: files cannot be read, or hold what cannot be trained; all of it is listed.
            RunError: options do not fit the data.
        """
        # A further classifier has labelled texts.
        teacher = self.settings.teacher if self.config.head is None else None
        if self.is_adaptive and teacher is not None:
            raise RunError("--adaptive-depth goes with labelled texts, not with --teacher")
        if self.is_adaptive and self.config.problem != "single_label_classification":
            raise RunError(
                f"--adaptive-depth goes with one label a text; this is {self.config.problem}"
            )
        return self._labelled() if teacher is None else self._taught(teacher)

    @property
    def is_adaptive(self) -> bool:
        """Whether there is a classifier after each layer, as only the default one has them."""
        return self.settings.adaptive_depth and self.task == CLASSIFICATION

    @property
    def _logits(self) -> LogitsFunction:
        logits: LogitsFunction = exit_logits if self.is_adaptive else cls_logits
        return compile_logits(logits) if self.compiles else logits

    def _labelled(self) -> Classification:
        """Return the data of labelled texts."""
        config, problem = self.config, self.config.problem
        errors: list[str] = []
        splits = self._read(errors)
        if errors:
            self._tokenise(splits, errors)  # raises them, with those of long texts
        if len(splits.names) < 2 and problem != "regression":
            shown = ", ".join(splits.names) or "none"
            raise CorpusError(f"all texts have the label {shown}; a classifier needs two or more")
        official = OFFICIAL[problem] if config.task is None else TASKS[config.task].metrics
        metrics = _metrics(config.metric, official, problem, len(splits.names))
        texts = splits.texts[TRAINING]
        weights = _class_weights(config.class_weights, texts, splits.names, problem)
        examples = self._tokenise(splits)
        return Classification(
            task=self.task,
            examples=examples[TRAINING],
            labels=label_keys(splits.names, multi_label=problem == "multi_label_classification"),
            loss=_loss(problem, self._logits, weights, is_adaptive=self.is_adaptive),
            held_out=examples.get(VALIDATION, ()),
            metrics=metrics,
            num_official=len(official),
            problem=problem,
            metric=config.metric,
        )

    def _read(self, errors: list[str]) -> LabelledSplits:
        """Read the files, and append their errors."""
        config = self.config
        files = {TRAINING: config.text_classification}
        if config.validation:
            files[VALIDATION] = config.validation
        if config.task is not None:
            return read_task(TASKS[config.task], files, errors)
        return read_splits(
            files, config.labels or None, config.columns, config.problem, errors=errors
        )

    def _tokenise(
        self, splits: LabelledSplits, errors: Sequence[str] = ()
    ) -> dict[str, Sequence[LabelledExample]]:
        return tokenise_splits(
            self.settings, self.tokenizer, splits.texts, labelled_examples, "texts", errors
        )

    def _taught(self, reference: str) -> Classification:
        """Return the data of texts with a teacher's logits as labels."""
        # Imported here, since only a teacher needs transformers.
        from training.distillation.pseudo_labels import (
            PseudoLabelLoss,
            TaskTeacher,
            pseudo_label,
            pseudo_labelled_examples,
        )

        config, settings, world = self.config, self.settings, self.world
        _check_teacher(settings)
        texts = read_texts(config.text_classification, config.columns)
        teacher = TaskTeacher.load(reference, world.device)
        official = OFFICIAL[teacher.problem]
        metrics = _metrics(config.metric, official, teacher.problem, len(teacher.names))
        held_out: Mapping[str, Sequence[LabelledExample]] = {}
        if config.validation:
            files = {VALIDATION: config.validation}
            held_out = self._tokenise(
                read_splits(files, teacher.names, config.columns, teacher.problem)
            )
        logits_NK = pseudo_label(texts, teacher, world, settings.output, self.precision)
        return Classification(
            task=self.task,
            examples=pseudo_labelled_examples(
                texts, logits_NK, self.tokenizer, length=settings.length
            ),
            labels=label_keys(
                teacher.names, multi_label=teacher.problem == "multi_label_classification"
            ),
            loss=PseudoLabelLoss(
                problem=teacher.problem,
                temperature=settings.temperature,
                held_out=_loss(teacher.problem, self._logits),
                logits=self._logits,
            ),
            held_out=held_out.get(VALIDATION, ()),
            metrics=metrics,
            num_official=len(official),
            problem=teacher.problem,
            metric=config.metric,
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


def _check_teacher(settings: FinetuneSettings) -> None:
    """Refuse options of labelled texts.

    Raises:
        RunError: there are some.
    """
    if settings.labels:
        raise RunError("--labels goes with labelled texts; with --teacher the labels are its own")
    for name in ("problem_type", "class_weights"):
        if getattr(settings, name):
            raise RunError(f"{flag_name(name)} goes with labelled texts, not with --teacher")
    if not settings.truncation:
        raise RunError("--no-truncation goes with labelled texts, not with --teacher")
