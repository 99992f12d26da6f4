"""Configuration of a finetuning run, whose fields are the command's flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from albert_serve.tasks.question_answering.task import DEFAULT_MAX_SEQ_LEN
from albert_serve.tasks.text_length import TRUNCATION_HELP
from training.conversion.source import REFERENCE_HELP
from training.data.labelled.folders import CHOICES, RACE, files_of_split
from training.data.labelled.rows import collecting, raise_listed
from training.errors import RunError
from training.finetuning.classifiers import (
    LABEL_OPTIONS,
    TEXT_OPTIONS,
    ClassifierConfig,
    ClassifierFiles,
)
from training.finetuning.recipes import DEFAULTS, LR_HELP, PAPER, SQUAD_1, SQUAD_2
from training.options.config import (
    COMPILE_HELP,
    ObjectiveOptions,
    Optimization,
    RunFolder,
    StoppingCriteria,
)
from training.options.flags import Options, flag, flag_name
from training.options.labelled import ENTITIES_HELP, ChoiceFiles
from training.options.values import Count, Fraction, Positive, Seed, Share
from training.tasks.question_answering.files import read_squad

_PAIR_OPTIONS: Final = ("order_share", "order_length", "order_sentences", "order_short_rate")
# Kinds of data by option. Each option requires one of its kinds.
_REQUIRES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "head_only": ("text_classification", "task", "heads"),
        "embedding_columns": ("embeddings",),
        **dict.fromkeys(("mask_rate", *_PAIR_OPTIONS), ("pretraining",)),
        **dict.fromkeys(TEXT_OPTIONS, ("text_classification", "multiple_choice", "task")),
    }
)
# Excluded options by option. A checkpoint can have only one head named `classifier`.
_EXCLUDES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "multiple_choice": ("text_classification", "heads", *LABEL_OPTIONS),
        "token_classification": ("text_classification", "multiple_choice", "task", "heads"),
        "head_only": (
            *("steps", "epochs", "budget", "recipe"),
            *("multiple_choice", "token_classification", "question_answering", "embeddings"),
            "pretraining",
        ),
    }
)


def _option_name(name: str) -> str:
    return "--head" if name == "heads" else flag_name(name)


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
        "number of positions to keep; removes unused positions at the end (default: all)"
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
    """Configuration of a finetuning run, whose fields are the command's flags.

    Attributes:
        initialize_from: folder of a checkpoint, model on the Hugging Face Hub, or None for the
            default model.
        heads: configurations of the named classifiers.
        question_length: maximum number of tokens in a question plus a window of its context, or
            None if the run has no questions.

    The recipe sets the length, the batch sizes and the hyperparameters that are None.

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
        """Check the combination of options before any data is read."""
        super().__post_init__()
        for name, data in _REQUIRES.items():
            if self._has(name) and not any(map(self._has, data)):
                raise RunError(
                    f"{_option_name(name)} requires {' or '.join(map(_option_name, data))}."
                )
        for name, excluded in _EXCLUDES.items():
            if self._has(name) and (conflicts := list(filter(self._has, excluded))):
                names = " and ".join(map(_option_name, conflicts))
                raise RunError(f"{_option_name(name)} cannot be combined with {names}.")

        for name, value in self._recipe_values().items():
            object.__setattr__(self, name, value)

    def _has(self, name: str) -> bool:
        is_race = name == "multiple_choice" and self.task == RACE
        return is_race or getattr(self, name) not in (None, (), False)

    def _recipe_values(self) -> dict[str, Any]:
        """Return the recipe's values of the fields that are not set, by name.

        The recipe's number of steps applies only if the run has no other end.
        """
        values = dict(DEFAULTS)
        if self.order_share:
            # The default weight is for batches with many masked tokens per sentence-order label.
            values["sentence_weight"] = 1.0
        length = self.length
        if self.recipe is not None:
            values |= PAPER[self._recipe_name]
            length = length or values["length"]
            if self.has_end or self.epochs:
                del values["steps"]
        if self.question_answering:
            values["question_length"] = length or DEFAULT_MAX_SEQ_LEN
        return {name: value for name, value in values.items() if getattr(self, name) in (None, ())}

    @property
    def _recipe_name(self) -> str:
        if self.task is not None:
            return self.task
        if self.has_questions_alone:
            has_answers = all(question.answers for question in read_squad(self.question_answering))
            return SQUAD_1 if has_answers else SQUAD_2
        raise RunError(
            f"--recipe {self.recipe} differs from task to task. Use --task, or "
            "--question-answering alone."
        )

    @property
    def has_choices(self) -> bool:
        """Whether multiple choice is trained."""
        return bool(self.multiple_choice or self.task == RACE)

    @cached_property
    def files(self) -> ClassifierFiles:
        """Files of the default classifier, or files and folders of multiple choice."""
        files = super().files
        if not self.multiple_choice:
            return files
        held_out = filter(_has_held_out_choices, self.multiple_choice)
        return ClassifierFiles(self.multiple_choice, self.validation or tuple(held_out))

    def check_files(self) -> None:
        """Find the files of all classifiers, and check that the validation fits them.

        The error lists all faults.
        """
        errors: list[str] = []
        for head in self.classifiers:
            with collecting(errors):
                head.files  # noqa: B018
        raise_listed(errors)
        has_default = self._has_default_head
        validation = self.files.validation
        if validation and not (has_default or self.question_answering or self.embeddings):
            raise RunError(
                "--validation requires labelled data: --text-classification, --multiple-choice, "
                "--token-classification, --question-answering or --embeddings."
            )
        if validation and self.heads and not has_default:
            raise RunError(
                "--validation before --head belongs to the default classifier, which has no data. "
                "Questions are validated only without classifiers. Move --validation after --head."
            )
        has_texts = any(head.has_texts for head in self.classifiers)
        if self.splits_validation and (has_texts or self.token_classification):
            return
        if any(head.metric and not head.files.validation for head in self.classifiers):
            raise RunError("--metric requires --validation.")

    @property
    def classifiers(self) -> tuple[ClassifierConfig, ...]:
        """The default classifier, which may have no data, and the named classifiers."""
        return (self, *self.heads)

    @property
    def _has_validation(self) -> bool:
        return any(head.files.validation for head in self.classifiers)

    @property
    def splits_validation(self) -> bool:
        """Whether the run holds out some of its labelled texts."""
        return self.validation_split > 0 and not self._has_validation

    @property
    def _has_default_head(self) -> bool:
        """Whether the run has data for the head named `classifier`."""
        return self.has_texts or self.has_choices or bool(self.token_classification)

    @property
    def has_held_out_vectors(self) -> bool:
        """Whether `--validation` measures embeddings, because no other head has data."""
        return not (self._has_default_head or self.question_answering)

    @property
    def validates_questions(self) -> bool:
        """Whether `--validation` measures questions, because no classifier has data."""
        return not (self._has_default_head or self.heads)

    @property
    def has_questions_alone(self) -> bool:
        """Whether questions are the only data of the run."""
        other_data = (self._has_default_head, self.embeddings, self.pretraining, self.heads)
        return bool(self.question_answering) and not any(other_data)


def _has_held_out_choices(path: Path) -> bool:
    """Return whether a folder of multiple choice has validation files."""
    return path.is_dir() and bool(files_of_split(path, "validation", suffixes=CHOICES))
