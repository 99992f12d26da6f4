"""Records of a finetuning run: its settings, its data, and the command that exports it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Final

from training.data.labelled.folders import RACE
from training.finetuning.classifiers import TEXT_OPTIONS, ClassifierConfig
from training.finetuning.config import FinetuneConfig
from training.model.provenance import file_names
from training.optim.optimizers import Hyperparameters
from training.options.flags import flag_name, flags_of
from training.options.tables import identify, is_table

# A run may resume with other values of these fields, such as smaller micro-batches if memory is
# short.
_NOT_RECORDED: Final = frozenset(
    {
        *("output", "device", "threads", "save_every", "report_every", "keep", "micro_batch_size"),
        *("validation", "validate_every", "metric", "precision"),
    }
)
# A run records these fields of each named head.
_HEAD_FIELDS: Final = ("head", "text_classification", "task", "data", *TEXT_OPTIONS)
# Validation and export measure data of these kinds in the same way, with the same columns.
_LABELLED = ("text_classification", "multiple_choice", "token_classification", "question_answering")
_COLUMNS = (
    *("text_column", "pair_column", "label_column", "label_separator", "delimiter"),
    "choice_columns",
)


def record_of(config: FinetuneConfig, hyperparameters: Hyperparameters) -> dict[str, str]:
    """Return the content of `run.json`, except the precision.

    A list is recorded in Python's notation, an empty list as None, a single label column by its
    name, and a table in memory by its hash.
    """
    names = [field.name for field in flags_of(FinetuneConfig)]
    record = {name: _recorded(config, name) for name in names if name not in _NOT_RECORDED}
    record["lr"] = str(hyperparameters.lr)
    if len(config.label_column) == 1:
        record["label_column"] = config.label_column[0]
    if config.question_answering:
        record["question_length"] = str(config.question_length)
    heads = [{name: _recorded(head, name) for name in _HEAD_FIELDS} for head in config.heads]
    return {**record, "heads": str(heads)}


def _recorded(config: ClassifierConfig, name: str) -> str:
    value = _value(config, name)
    if not isinstance(value, tuple):
        return str(value)
    items = [identify(item) if isinstance(item, Path) else item for item in value]
    return str(items if items or name == "choice_columns" else None)


def _value(config: ClassifierConfig, name: str) -> Any:
    """Return the value of a field, with files in place of folders and tasks."""
    if name == "text_classification":
        return tuple(config.files.train) if config.has_texts else ()
    if name == "multiple_choice" and config.task == RACE:
        return tuple(config.files.train)
    return config.task_folder if name == "data" else getattr(config, name)


def data_names(config: FinetuneConfig, start: str) -> dict[str, list[str]]:
    """Return the names of the data files without their folders."""
    heads = config.classifiers
    folders = [head.task_folder for head in heads if head.task_folder is not None]
    texts = [file for head in heads for file in _value(head, "text_classification")]
    return {
        "initialize_from": [start],
        "data": file_names(folders),
        "text_classification": file_names(texts),
        "multiple_choice": file_names(_value(config, "multiple_choice")),
        "validation": file_names([file for head in heads for file in head.files.validation]),
        "token_classification": file_names(config.token_classification),
        "question_answering": file_names(config.question_answering),
        "embeddings": file_names(config.embeddings),
        "pretraining": file_names(config.pretraining),
    }


def export_command(config: FinetuneConfig) -> str | None:
    """Return the command that exports the best checkpoint and measures it on the validation files.

    There is no such command without validation files, for embeddings, and for tables in memory.
    """
    if any(is_table(file) for head in config.classifiers for file in head.files.validation):
        return None
    options = [word for head in config.classifiers for word in _options_of(head)]
    folder = config.output
    words = ["albert-serve", "export", str(folder / "best"), f"bundles/{folder.resolve().name}"]
    return shlex.join([*words, "--precision", "int8", *options]) if options else None


def _options_of(head: ClassifierConfig) -> list[str]:
    """Return export's options for the validation files of a classifier."""
    options: dict[str, Any]
    if head.task is not None:
        options = {"task": head.task, "data": head.task_folder}
    else:
        held_out = head.files.validation
        data = [name for name in _LABELLED if getattr(head, name, ())] if held_out else []
        if not data:
            return []
        columns = {name: getattr(head, name, None) for name in _COLUMNS}
        options = {data[0]: tuple(held_out), **columns}
    words = [] if head.head is None else ["--head", head.head]
    for name, value in options.items():
        if value:
            values = value if isinstance(value, tuple) else (value,)
            words += [flag_name(name), *map(str, values)]
    return words
