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
        "kind of the labels: one per text, any number per text, or a number (default: "
        "single_label_classification)"
    )
    labels: tuple[str, ...] = flag(
        "names of the labels 0, 1, ... (default: those in the files, sorted)", ()
    )
    class_weights: tuple[Annotated[str | float, Parsed(_parse_class_weight)], ...] = flag(
        "weights of the labels in the loss, in their order, or `balanced`: by the inverse of "
        "their frequencies (default: 1)",
        (),
        metavar="WEIGHT",
    )
    validation: tuple[Path, ...] = flag(
        "held-out files of text classification or multiple choice, otherwise of question "
        "answering, otherwise of embeddings (pairs with a score); the best checkpoint is stored"
        " as `best` (default with --task: val.tsv if it exists, otherwise its dev files)",
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
        "steps between validations; the end of the run is validated too (default: an epoch; "
        "several tasks: 500)"
    )
    validation_split: Share = flag(
        "fraction of the labelled texts to hold out without --validation, 0 (none) to below 1",
        0.1,
    )
    patience: Count | None = flag(
        "number of validations without improvement after which the run stops (default: 5, "
        "unless --steps, --epochs or --budget is set)"
    )


@dataclass(frozen=True, kw_only=True)
class _TokenOptions(Options, title="entities"):
    token_classification: tuple[Path, ...] = flag(ENTITIES_HELP, ())


@dataclass(frozen=True, kw_only=True)
class _QuestionOptions(Options, title="questions"):
    question_answering: tuple[Path, ...] = flag("question answering: files in SQuAD's format", ())


@dataclass(frozen=True, kw_only=True)
class _EmbeddingOptions(Options, title="embeddings"):
    embeddings: tuple[Path, ...] = flag(
        "embeddings: CSV, TSV, JSONL or Parquet files of pairs that belong together (anchor, "
        "positive), triplets (also negative), or pairs with a score (sentence1, sentence2, "
        "score)",
        (),
    )
    embedding_columns: tuple[str, ...] = flag(
        "columns of --embeddings: the texts in this order, then the score (default: the usual "
        "names)",
        (),
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class _PretrainingOptions(ObjectiveOptions, title="continued pretraining"):
    pretraining: tuple[Path, ...] = flag("pretraining: text, as files or folders", ())
    order_short_rate: Fraction | None = flag(
        "fraction of the documents cut into pairs of a random shorter length, 0 to 1 (default: 0.1)"
    )


@dataclass(frozen=True, kw_only=True)
class _TrainingOptions(Optimization, title="training"):
    recipe: Literal["paper"] | None = flag(
        "hyperparameters of the paper's table 14, for --task or for --question-answering alone"
    )
    length: Count = flag(
        "maximum tokens of a text (default: 128; of a question with its context: "
        f"{DEFAULT_MAX_SEQ_LEN}, or the model's positions if fewer)"
    )
    batch_size: tuple[Count, ...] = flag(
        "examples per step (pretraining: rows of --length tokens); one number, or one per task "
        "in the order of --weights",
        (),
    )
    weights: tuple[Positive, ...] = flag(
        "relative frequency of each task, in the order of classifiers, multiple choice, "
        "entities, questions, embeddings and pretraining (default: 1)",
        (),
    )
    seed: Seed = flag("seed of data order, masks and dropout")
    micro_batch_size: Count | None = flag(
        "maximum number of examples per forward pass, to save memory (default: all of a process)"
    )
    dropout: Fraction | None = flag(
        "dropout of hidden states and attention, 0 to 1 (default: the checkpoint's)"
    )
    classifier_dropout: Fraction | None = flag(
        "dropout of pooled states, 0 to 1 (default: the checkpoint's)"
    )
    max_positions: Count | None = flag(
        "number of positions to keep; removes those that pretraining never used (default: all)"
    )
    truncation: bool = flag(TRUNCATION_HELP, default=True)
    head_only: bool = flag(
        "only fit the new classifiers, which takes seconds; repeat the command without this "
        "option to continue",
        default=False,
    )
    compile: bool | None = flag(f"{COMPILE_HELP} (default: no)", default=False)


@dataclass(frozen=True, kw_only=True)
class _StoppingCriteria(StoppingCriteria, title=StoppingCriteria.title):
    epochs: Positive | None = flag("number of passes over the examples, if there is one task")


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
        f"{REFERENCE_HELP} (default: the default model)", metavar="CHECKPOINT"
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
