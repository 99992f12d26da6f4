"""Validation of a finetuning run on the held-out data of all its tasks."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from albert_serve.files import sha256_of
from training.data.corpus import find_files
from training.data.labelled.folders import CHOICES, files_of_split
from training.evaluation.metrics import LOWEST
from training.evaluation.validation import HEADS_MEAN, Validation
from training.finetuning.choices import Choices
from training.finetuning.classification import Classification
from training.finetuning.questions import Questions
from training.finetuning.settings import FinetuneSettings
from training.loop.progress import RunError
from training.loop.provenance import file_names
from training.loop.selection import Selection

# The data of a task that has validation.
Measured: TypeAlias = Classification | Choices | Questions


def validation_of(datasets: Sequence[Measured], *, every: int, row_length: int) -> Validation:
    """Return the validation on the held-out data of all."""
    each = [one.validation(every=every, row_length=row_length) for one in datasets]
    if len(each) == 1:
        return each[0]
    classifiers = [one for one in datasets if isinstance(one, Classification)]
    return Validation(
        batches=[batch for one in each for batch in one.batches],
        every=every,
        tasks=tuple(one.task for one in classifiers),
        metrics={one.task: one.figures for one in classifiers},
        deciding={one.task: one.figure for one in classifiers},
    )


def selection_of(datasets: Sequence[Measured], settings: FinetuneSettings) -> Selection:
    """Return the selection of the best validation; of several classifiers by their mean.

    Raises:
        RunError: of a figure of several the lowest is the best.
    """
    figures = [one.figure for one in datasets]
    figure, chance = figures[0], datasets[0].chance
    if len(datasets) > 1:
        if lowest := [each for each in figures if each in LOWEST]:
            raise RunError(
                f"--metric {lowest[0]}: with several classifiers validated, the mean of their "
                "metrics decides, of which the highest is the best; take another"
            )
        chances = [one.chance for one in datasets if one.chance is not None]
        figure, chance = HEADS_MEAN, statistics.fmean(chances)
    files = [each.validation for each in settings.classifiers if each.validation]
    return Selection(
        figure=figure,
        chance=chance,
        measured="; ".join(map(describe_held_out, figures, files)),
        patience=settings.patience,
    )


def describe_held_out(figure: str, held_out: Sequence[Path]) -> str:
    """Describe a figure of held-out files by their names and their content."""
    hashes = "".join(sha256_of(file) for path in held_out for file in _files_at(path))
    content = hashlib.sha256(hashes.encode()).hexdigest()[:12]
    return f"{figure} of {', '.join(file_names(held_out))} (content {content})"


def _files_at(path: Path) -> list[Path]:
    """Return a file, or those of a folder: the held-out ones if its names tell splits."""
    of_split = files_of_split(path, "validation", suffixes=CHOICES) if path.is_dir() else []
    return of_split or find_files([path])
