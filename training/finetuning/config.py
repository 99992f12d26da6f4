"""Configuration of a finetuning run, by the names of the command's flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

from albert_serve.bundle.manifest import ProblemType
from albert_serve.tasks.question_answering.task import DEFAULT_MAX_SEQ_LEN
from albert_serve.tasks.text_length import TRUNCATION_HELP
from training.conversion.source import REFERENCE_HELP
from training.data.labelled.cells import first_spellings
from training.errors import RunError
from training.finetuning.recipes import DEFAULTS, LR_HELP
from training.glue.tasks import TASKS, Metric
from training.options.config import (
    COMPILE_HELP,
    ObjectiveOptions,
    Optimization,
    RunFolder,
    StoppingCriteria,
)
from training.options.flags import Options, flag, flag_name
from training.options.labelled import ENTITIES_HELP, ChoiceFiles, LabelledTexts
from training.options.values import Count, Fraction, Parsed, Positive, Seed, Share, parse_positive

_Figure = Literal["loss", Metric, "exact_match"]
# Options of the labels of a classifier's texts, and of their columns.
_OF_LABELS: Final = ("problem_type", "labels", "class_weights")
OF_TEXTS: Final = (
    *_OF_LABELS,
    *("text_column", "pair_column", "label_column", "label_separator", "delimiter"),
)
_OF_PAIRS: Final = ("order_share", "order_length", "order_sentences", "order_short_rate")
# Options, each with the data of which one has to be given with it.
_NEEDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "head_only": ("text_classification", "task", "heads"),
        "embedding_columns": ("embeddings",),
        **dict.fromkeys(("mask_rate", *_OF_PAIRS), ("pretraining",)),
        **dict.fromkeys(OF_TEXTS, ("text_classification", "multiple_choice", "task")),
    }
)
# Options that exclude others. A checkpoint has one head named `classifier`.
_EXCLUDES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "multiple_choice": ("text_classification", "heads", *_OF_LABELS),
        "token_classification": ("text_classification", "multiple_choice", "task", "heads"),
        "head_only": (
            *("steps", "epochs", "budget", "recipe"),
            *("multiple_choice", "token_classification", "question_answering", "embeddings"),
            "pretraining",
        ),
    }
)


def _shown(name: str) -> str:
    return "--head" if name == "heads" else flag_name(name)


def _parse_class_weight(text: str) -> str | float:
    """Parse `balanced`, or a number above 0."""
    return text if text == "balanced" else parse_positive(text)


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(LabelledTexts, title="labelled texts"):
    """The data of a classifier of texts, and its validation."""

    problem_type: ProblemType | None = flag(
        "of those files: one label a text, any number of labels, or a number "
        "(single_label_classification)"
    )
    labels: tuple[str, ...] = flag("names of the labels 0, 1, ... of those files", ())
    class_weights: tuple[Annotated[str | float, Parsed(_parse_class_weight)], ...] = flag(
        "factors of the loss of each label, in their order; `balanced` weighs a label by the "
        "inverse of its frequency",
        (),
        metavar="WEIGHT",
    )
    validation: tuple[Path, ...] = flag(
        "held-out files of text classification or multiple choice, or else of question answering, "
        "or else of embeddings (pairs with a score), measured during training; the best checkpoint "
        "is kept as `best` (with --task: val.tsv if there is one, or its dev files)",
        (),
    )
    metric: _Figure | None = flag(
        "metric that selects the best checkpoint (default: the task's; with several classifiers, "
        "their mean)"
    )

    def __post_init__(self) -> None:
        """Check that each label is named once."""
        super().__post_init__()
        if len(first_spellings(self.labels)) < len(self.labels):
            raise RunError(
                f"--labels {' '.join(self.labels)}: two labels differ in case or outer spaces "
                "alone. Name each label once"
            )

    @property
    def problem(self) -> ProblemType | None:
        """The kind of the task: as --task or --problem-type says, or as the columns tell, if so."""
        if self.task is not None:
            return TASKS[self.task].problem
        if self.problem_type is None and self.columns.has_several_labels:
            return "multi_label_classification"
        return self.problem_type


@dataclass(frozen=True, kw_only=True)
class _EarlyStopping(Options, title="validation"):
    validate_every: Count | None = flag(
        "steps between validations (an epoch; of several tasks 500); the end of the run is "
        "validated in any case"
    )
    validation_split: Share = flag(
        "part of the labelled texts that is held out where no --validation is given; 0 for none",
        0.1,
    )
    patience: Count | None = flag(
        "stop after so many validations without a new best (5, if the end of the run is not given)"
    )


@dataclass(frozen=True, kw_only=True)
class _TokenOptions(Options, title="entities"):
    token_classification: tuple[Path, ...] = flag(ENTITIES_HELP, ())


@dataclass(frozen=True, kw_only=True)
class _QuestionOptions(Options, title="questions"):
    question_answering: tuple[Path, ...] = flag("SQuAD files", ())


@dataclass(frozen=True, kw_only=True)
class _EmbeddingOptions(Options, title="embeddings"):
    embeddings: tuple[Path, ...] = flag(
        "files of texts whose vectors are learnt: pairs that belong together (anchor, positive), "
        "triplets (and negative), or pairs with a score (sentence1, sentence2, score); CSV, TSV, "
        "JSONL or Parquet",
        (),
    )
    embedding_columns: tuple[str, ...] = flag(
        "columns of those texts in that order, and of the score (the usual names)",
        (),
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class _PretrainingOptions(ObjectiveOptions, title="continued pretraining"):
    pretraining: tuple[Path, ...] = flag("text for continued pretraining", ())
    order_short_rate: Fraction | None = flag(
        "fraction of the documents cut into pairs of a random shorter length (0.1)"
    )


@dataclass(frozen=True, kw_only=True)
class _TrainingOptions(Optimization, title="training"):
    recipe: Literal["paper"] | None = flag(
        "the paper's hyperparameters (table 14) of --task, or of --question-answering alone"
    )
    length: Count = flag(
        "maximum tokens of a sequence; by default of a question with its context "
        f"{DEFAULT_MAX_SEQ_LEN}, or the model's positions, and of others"
    )
    batch_size: tuple[Count, ...] = flag(
        "examples per step, of pretraining rows of --length tokens; one number, or one for each "
        "task in the order of --weights",
        (),
    )
    weights: tuple[Positive, ...] = flag(
        "relative frequency of each task, in the order of classifiers, multiple choice, entities, "
        "questions, embeddings and pretraining (1)",
        (),
    )
    seed: Seed = flag("seed of data order, masks and dropout")
    micro_batch_size: Count | None = flag(
        "maximum number of examples per forward pass, for less memory (all of a process)"
    )
    dropout: Fraction | None = flag("of hidden states and attention (the checkpoint's)")
    classifier_dropout: Fraction | None = flag("of pooled states (the checkpoint's)")
    max_positions: Count | None = flag("drop positions that pretraining never used")
    truncation: bool = flag(TRUNCATION_HELP, default=True)
    head_only: bool = flag(
        "fit the new classifiers, which takes seconds, and leave the encoder as it is; the same "
        "command without it goes on from there",
        default=False,
    )
    compile: bool | None = flag(f"{COMPILE_HELP} (default: no)", default=False)


@dataclass(frozen=True, kw_only=True)
class _StoppingCriteria(StoppingCriteria, title=StoppingCriteria.title):
    epochs: Positive | None = flag("passes over the examples, of one task")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(
    RunFolder,
    _TrainingOptions,
    _StoppingCriteria,
    _PretrainingOptions,
    _EmbeddingOptions,
    _QuestionOptions,
    _TokenOptions,
    ChoiceFiles,
    _EarlyStopping,
    ClassifierConfig,
    title="start",
):
    """Configuration of a finetuning run; the fields are the command's flags.

    Attributes:
        initialize_from: a checkpoint's folder, or a model of the Hugging Face Hub; None for the
            model that ships.
        heads: further classifiers, which have a `head` each.
        question_length: maximum tokens of a question with a window of its context; None without
            questions.

    `settings.settle` decides the length, the batch sizes and the hyperparameters that are not
    given. A run reads only a configuration that is settled.

    Raises:
        RunError: a value is not allowed, or options contradict each other.
    """

    defaults: ClassVar[Mapping[str, Any]] = {**DEFAULTS, "lr": LR_HELP}

    initialize_from: str | None = flag(
        f"{REFERENCE_HELP} (the model that ships)", metavar="CHECKPOINT"
    )
    heads: tuple[ClassifierConfig, ...] = ()
    question_length: int | None = None

    def __post_init__(self) -> None:
        """Check what goes together, before any data is read."""
        super().__post_init__()
        for name, data in _NEEDS.items():
            if self._has(name) and not any(map(self._has, data)):
                raise RunError(f"{_shown(name)} requires {' or '.join(map(_shown, data))}")
        for name, others in _EXCLUDES.items():
            if self._has(name) and (given := list(filter(self._has, others))):
                raise RunError(
                    f"{_shown(name)} cannot be combined with {' and '.join(map(_shown, given))}"
                )

    def _has(self, name: str) -> bool:
        return getattr(self, name) not in (None, (), False)

    @property
    def no_truncation(self) -> bool:
        """Whether longer texts are an error."""
        return not self.truncation

    @property
    def classifiers(self) -> tuple[ClassifierConfig, ...]:
        """The default classifier, which may have no data, and the further ones."""
        return (self, *self.heads)

    @property
    def splits_validation(self) -> bool:
        """Whether some labelled texts are held out."""
        has_validation = any(head.validation for head in self.classifiers)
        return self.validation_split > 0 and not has_validation

    @property
    def has_held_out_vectors(self) -> bool:
        """Whether `--validation` is of embeddings: it is, without data of other heads."""
        others = (self.text_classification, self.multiple_choice, self.token_classification)
        return bool(self.validation) and not any((*others, self.question_answering))

    @property
    def validates_questions(self) -> bool:
        """Whether `--validation` is of questions, as it is without data of classifiers."""
        others = (self.text_classification, self.multiple_choice, self.token_classification)
        return bool(self.validation and self.question_answering) and not any((*others, self.heads))

    @property
    def has_questions_alone(self) -> bool:
        """Whether the run's only data are questions."""
        others = (self.text_classification, self.multiple_choice, self.token_classification)
        more = (self.embeddings, self.pretraining, self.heads)
        return bool(self.question_answering) and not any((*others, *more))
