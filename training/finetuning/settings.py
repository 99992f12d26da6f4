"""Decisions that the configuration of a finetuning run leaves open, and its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from albert_serve.tasks.question_answering.task import DEFAULT_MAX_SEQ_LEN
from training.data.labelled.folders import CHOICES, RACE, files_of_split, labelled_files, race_files
from training.data.labelled.rows import collecting, raise_listed
from training.errors import RunError
from training.finetuning.config import OF_TEXTS, ClassifierConfig, FinetuneConfig
from training.finetuning.recipes import DEFAULTS, PAPER, SQUAD_1, SQUAD_2
from training.glue.files import training_files
from training.glue.tasks import TASKS
from training.model.provenance import file_names
from training.optim.optimizers import Hyperparameters
from training.options.flags import flags_of
from training.options.labelled import with_task_data
from training.options.tables import identify
from training.tasks.question_answering.files import read_squad

_ConfigT = TypeVar("_ConfigT", bound=ClassifierConfig)
# Fields that a run may be resumed with other values of, such as smaller micro-batches where it
# lacks memory.
_NOT_RECORDED: Final = frozenset(
    {
        *("output", "device", "threads", "save_every", "report_every", "keep", "micro_batch_size"),
        *("validation", "validate_every", "metric", "precision"),
    }
)
# A run records these fields of each named head.
_OF_HEAD: Final = ("head", "text_classification", "task", "data", *OF_TEXTS)


def record_of(config: FinetuneConfig, hyperparameters: Hyperparameters) -> dict[str, str]:
    """Return the content of `run.json` of a settled configuration, but for the precision.

    Lists are recorded as Python's, empty ones as None, one label column by its name, and tables in
    memory by their hashes.
    """
    names = [field.name for field in flags_of(FinetuneConfig)]
    record = {name: _recorded(config, name) for name in names if name not in _NOT_RECORDED}
    record["lr"] = str(hyperparameters.lr)
    if len(config.label_column) == 1:
        record["label_column"] = config.label_column[0]
    if config.question_answering:
        record["question_length"] = str(config.question_length)
    heads = [{name: _recorded(head, name) for name in _OF_HEAD} for head in config.heads]
    return {**record, "heads": str(heads)}


def _recorded(config: ClassifierConfig, name: str) -> str:
    value = getattr(config, name)
    if not isinstance(value, tuple):
        return str(value)
    items = [identify(item) if isinstance(item, Path) else item for item in value]
    return str(items if items or name == "choice_columns" else None)


def data_names(config: FinetuneConfig, start: str) -> dict[str, list[str]]:
    """Return the names of the data files without their folders."""
    heads = config.classifiers
    return {
        "initialize_from": [start],
        "data": file_names([head.data for head in heads if head.data is not None]),
        "text_classification": file_names(
            [file for head in heads for file in head.text_classification]
        ),
        "multiple_choice": file_names(config.multiple_choice),
        "validation": file_names([file for head in heads for file in head.validation]),
        "token_classification": file_names(config.token_classification),
        "question_answering": file_names(config.question_answering),
        "embeddings": file_names(config.embeddings),
        "pretraining": file_names(config.pretraining),
    }


def settle(config: FinetuneConfig) -> FinetuneConfig:
    """Fill in the open settings, except a rate that depends on the model.

    Files take the place of folders and tasks; data sets are downloaded if need be.

    Raises:
        RunError: data and options do not go together.
        CorpusError: files of tasks are missing; all are listed.
    """
    errors: list[str] = []
    config = with_task_data(config)
    values = _hyperparameters(config)
    with collecting(errors):
        config = _with_files(config)
    heads = []
    for head in config.heads:
        with collecting(errors):
            heads.append(_with_files(with_task_data(head)))
    raise_listed(errors)
    settled = replace(config, **values, heads=tuple(heads))
    _check_validation(settled)
    return settled


def _hyperparameters(config: FinetuneConfig) -> dict[str, Any]:
    """Return the values of the recipe that are not given, by the fields' names.

    The recipe's number of steps counts only if no end of the run is given.
    """
    values = dict(DEFAULTS)
    if config.order_share:
        # The default is for one label a sequence among its masked tokens.
        values["sentence_weight"] = 1.0
    length = config.length
    if config.recipe is not None:
        values |= PAPER[_recipe_name(config)]
        length = length or values["length"]
        if config.has_end or config.epochs:
            del values["steps"]
    missing = {name: value for name, value in values.items() if getattr(config, name) in (None, ())}
    windows = length or DEFAULT_MAX_SEQ_LEN
    return {**missing, "question_length": windows if config.question_answering else None}


def _recipe_name(config: FinetuneConfig) -> str:
    if config.task is not None:
        return config.task
    if config.has_questions_alone:
        has_answers = all(question.answers for question in read_squad(config.question_answering))
        return SQUAD_1 if has_answers else SQUAD_2
    raise RunError(
        f"--recipe {config.recipe} differs from task to task; give --task, or "
        "--question-answering alone"
    )


def _with_files(config: _ConfigT) -> _ConfigT:
    """Return the configuration with files in place of folders and tasks.

    Raises:
        CorpusError: a folder has none.
    """
    validation: Sequence[Path] = config.validation
    if config.task == RACE:
        return _with_race(config)
    if config.task is not None:
        assert config.data is not None
        files = training_files(TASKS[config.task], config.data)
        train, validation = files.train, validation or files.validation or ()
    elif config.text_classification:
        train = labelled_files(config.text_classification, "train")
        validation = _held_out_texts(config)
    else:
        folders = getattr(config, "multiple_choice", ())
        return replace(
            config, validation=tuple(validation or filter(_has_held_out_choices, folders))
        )
    return replace(config, text_classification=tuple(train), validation=tuple(validation))


def _held_out_texts(config: ClassifierConfig) -> Sequence[Path]:
    """Return the files of validation: where none are given, those in the training folders."""
    validation = list(config.validation)
    if not validation:
        folders = [path for path in config.text_classification if path.is_dir()]
        validation = [file for folder in folders for file in files_of_split(folder, "validation")]
        if validation:
            print(f"validation on {', '.join(map(str, validation))}")
    return labelled_files(validation, "validation") if validation else ()


def _with_race(config: _ConfigT) -> _ConfigT:
    assert config.data is not None
    errors: list[str] = []
    splits: dict[Literal["train", "dev"], Sequence[Path]] = {
        "train": (),
        "dev": config.validation,
    }
    for split, files in splits.items():
        if not files:
            with collecting(errors):
                splits[split] = race_files(config.data, split)
    raise_listed(list(dict.fromkeys(errors)))  # both if the folder is none
    changes: dict[str, Any] = {"multiple_choice": tuple(splits["train"])}
    return replace(config, validation=tuple(splits["dev"]), **changes)


def _has_held_out_choices(path: Path) -> bool:
    """Whether a folder, which stays one, has files of validation of multiple choice."""
    return path.is_dir() and bool(files_of_split(path, "validation", suffixes=CHOICES))


def _check_validation(config: FinetuneConfig) -> None:
    """Check that validation and its options go with the data.

    Raises:
        RunError: they do not.
    """
    has_default = bool(
        config.text_classification or config.multiple_choice or config.token_classification
    )
    if config.validation and not (has_default or config.question_answering or config.embeddings):
        raise RunError(
            "--validation requires labelled data: --text-classification, --multiple-choice, "
            "--token-classification, --question-answering or --embeddings"
        )
    if config.validation and config.heads and not has_default:
        raise RunError(
            "--validation before --head is of the default classifier, which has no data here; "
            "questions are validated only without classifiers: give it after --head"
        )
    has_texts = any(head.text_classification for head in config.classifiers)
    if config.splits_validation and (has_texts or config.token_classification):
        return
    if config.patience is not None and not any(head.validation for head in config.classifiers):
        raise RunError("--patience requires --validation")
    if any(head.metric is not None and not head.validation for head in config.classifiers):
        raise RunError("--metric requires --validation")
