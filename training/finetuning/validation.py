"""Validation of a finetuning run on the held-out data of its tasks, and the choice of the best."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from albert_serve.files import sha256_of
from training.data.corpus import find_files
from training.data.labelled.folders import CHOICES, files_of_split
from training.errors import RunError
from training.finetuning.config import ClassifierConfig, FinetuneConfig
from training.finetuning.steps import steps_an_epoch
from training.loop.early_stopping import LOWEST, BestValidation
from training.loop.validation import HEADS_MEAN, Validation
from training.model.provenance import file_names
from training.options.flags import flag_name
from training.options.tables import is_table
from training.tasks.base import TrainingTask
from training.tasks.classification.loss import Classification

# Steps between validations of several tasks.
_VALIDATE_EVERY = 500
# Of a run whose end is not given, which has 3 to 20 passes.
_PATIENCE = 5
# Data that validation and export measure alike, and the options of its columns.
_MEASURED = ("text_classification", "multiple_choice", "token_classification", "question_answering")
_COLUMNS = (
    *("text_column", "pair_column", "label_column", "label_separator", "delimiter"),
    "choice_columns",
)


class Validating(NamedTuple):
    """The validation of a run and the selection of its best; None without held-out data."""

    validation: Validation | None
    every: int
    selection: BestValidation | None


def validating(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> Validating:
    """Return the validation on the held-out data of all tasks.

    Raises:
        RunError: options need held-out data, or of a figure of several tasks the lowest is best.
    """
    every = config.validate_every or steps_an_epoch(tasks) or _VALIDATE_EVERY
    validated = [task for task in tasks if task.validation is not None]
    validations = [task.validation for task in tasks if task.validation is not None]
    if not validated:
        if config.patience or any(head.metric for head in config.classifiers):
            raise RunError("--patience and --metric need held-out data; give --validation")
        return Validating(None, every, None)
    selection = _selection_of(validated, config)
    if len(validations) == 1:
        return Validating(validations[0], every, selection)
    classifiers = [task for task in validated if isinstance(task, Classification)]
    together = Validation(
        batches=[batch for validation in validations for batch in validation.batches],
        tasks=tuple(task.name for task in classifiers),
        metrics={task.name: task.metrics.figures for task in classifiers},
        deciding={task.name: task.figure for task in classifiers},
    )
    return Validating(together, every, selection)


def _selection_of(tasks: Sequence[TrainingTask], config: FinetuneConfig) -> BestValidation:
    """Return the selection of the best validation; of several classifiers by their mean."""
    figures = [task.figure for task in tasks]
    figure = figures[0]
    if len(tasks) > 1:
        if lowest := [name for name in figures if name in LOWEST]:
            raise RunError(
                f"--metric {lowest[0]}: with several classifiers validated, the mean of their "
                "metrics decides, of which the highest is the best; take another"
            )
        figure = HEADS_MEAN
    if config.splits_validation:
        files = [head.text_classification for head in config.classifiers]
        files = [config.token_classification] if config.token_classification else files
        part = f"{config.validation_split:g} of "
    else:
        files, part = [head.validation for head in config.classifiers], ""
    return BestValidation(
        figure=figure,
        measured="; ".join(
            _describe_held_out(figure, its, part)
            for figure, its in zip(figures, filter(None, files), strict=False)
        ),
        patience=_patience_of(config),
    )


def export_command(config: FinetuneConfig) -> str | None:
    """Return the command that exports the best checkpoint, measured on the validation files.

    None without such files, of embeddings, and of tables in memory, whose files are removed.
    """
    if any(is_table(file) for head in config.classifiers for file in head.validation):
        return None
    measured = [word for head in config.classifiers for word in _options_of(head)]
    folder = config.output
    words = ["albert-serve", "export", str(folder / "best"), f"bundles/{folder.resolve().name}"]
    return shlex.join([*words, "--precision", "int8", *measured]) if measured else None


def _options_of(head: ClassifierConfig) -> list[str]:
    """Return the options of the validation files of a classifier, as export takes them."""
    options: dict[str, Any]
    if head.task is not None:
        options = {"task": head.task, "data": head.data}
    else:
        data = [name for name in _MEASURED if getattr(head, name, ())] if head.validation else []
        if not data:
            return []
        columns = {name: getattr(head, name, None) for name in _COLUMNS}
        options = {data[0]: head.validation, **columns}
    words = [] if head.head is None else ["--head", head.head]
    for name, value in options.items():
        if value:
            values = value if isinstance(value, tuple) else (value,)
            words += [flag_name(name), *map(str, values)]
    return words


def _patience_of(config: FinetuneConfig) -> int | None:
    """Return the patience: the default one only of a run whose end is not given."""
    has_end = config.has_end or config.epochs is not None
    return config.patience or (None if has_end else _PATIENCE)


def _describe_held_out(figure: str, held_out: Sequence[Path], part: str) -> str:
    """Describe a figure of held-out files, or of a part of them, by their names and content."""
    hashes = "".join(sha256_of(file) for path in held_out for file in _files_at(path))
    content = hashlib.sha256(hashes.encode()).hexdigest()[:12]
    return f"{figure} of {part}{', '.join(file_names(held_out))} (content {content})"


def _files_at(path: Path) -> list[Path]:
    """Return a file, or a folder's files: the held-out ones if the names tell splits."""
    of_split = files_of_split(path, "validation", suffixes=CHOICES) if path.is_dir() else []
    return of_split or find_files([path])
