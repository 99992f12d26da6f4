"""The classifiers of a finetuning run: the default one, and further ones beside it."""

from __future__ import annotations

import argparse
import hashlib
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from albert_serve.bundle.manifest import DEFAULT_HEAD
from albert_serve.bundle.weights import CLASSIFICATION, further_head
from albert_serve.files import sha256_of
from training.data.corpus import find_files
from training.data.labelled.folders import CHOICES, files_of_split
from training.evaluation.metrics import LOWEST
from training.evaluation.validation import HEADS_MEAN, Validation
from training.finetuning.choices import Choices
from training.finetuning.classification import Classification
from training.finetuning.held_out import Questions
from training.loop.progress import RunError
from training.loop.provenance import file_names
from training.loop.selection import Selection
from training.model.heads import Task, is_classifier
from training.model.labels import default_name, head_record, labels_config

# The data of a task that has validation.
Measured: TypeAlias = Classification | Choices | Questions
# Options of the labels and columns of a classifier's texts.
_OF_TEXTS: Final = (
    *("problem_type", "labels", "class_weights"),
    *("text_column", "pair_column", "label_column", "label_separator", "delimiter"),
)
# Options of a classifier's data that change the weights, as a run records them.
_RECORDED: Final = ("head", "text_classification", "task", "data", *_OF_TEXTS)


class Placed(NamedTuple):
    """A classifier of a run.

    Attributes:
        task: its head in the model.
        name: None without `--head`.
        options: the command's, with those of its own data.
    """

    task: Task
    name: str | None
    options: argparse.Namespace


def place(
    options: argparse.Namespace, stored: Mapping[Task, int], hf: Mapping[str, Any]
) -> list[Placed]:
    """Return the classifiers that are trained, in the order of --weights.

    Data before `--head` is the default classifier's, which `transformers` reads. Without, and in a
    checkpoint that has none, the default is the head of that name, or else the first.

    Args:
        stored: heads of the checkpoint.
        hf: its `config.json`.

    Raises:
        RunError: two classifiers have one name, or options do not go together.
    """
    heads: Sequence[argparse.Namespace] = options.heads
    if heads and options.multiple_choice:
        raise RunError(
            "--head and --multiple-choice do not go together: multiple choice takes the place of "
            "the default classifier"
        )
    _check_has_data(options)
    placed = [Placed(CLASSIFICATION, None, options)] if options.text_classification else []
    default = default_name(hf) or DEFAULT_HEAD
    if heads and not placed and CLASSIFICATION not in stored:
        default = next((head.head for head in heads if head.head == DEFAULT_HEAD), heads[0].head)
    for head in heads:
        if head.head == DEFAULT_HEAD != default:
            raise RunError(f"--head {DEFAULT_HEAD}: the default classifier is named {default}")
        task = CLASSIFICATION if head.head == default else further_head(head.head)
        if task == CLASSIFICATION and options.text_classification:
            raise RunError(
                f"--head {head.head} names the default classifier, whose data stands before --head "
                "already; give another name"
            )
        depth = options.adaptive_depth and task == CLASSIFICATION
        own = argparse.Namespace(**{**vars(head), "adaptive_depth": depth})
        placed.append(Placed(task, head.head, own))
    if options.adaptive_depth and CLASSIFICATION not in [each.task for each in placed]:
        raise RunError(
            "--adaptive-depth is of the default text classifier; give its --text-classification"
        )
    return placed


def _check_has_data(options: argparse.Namespace) -> None:
    """Check that options of the default classifier's labels and columns go with data of its own.

    Raises:
        RunError: they do not.
    """
    options_given = [name for name in _OF_TEXTS if getattr(options, name) is not None]
    if options_given and not (options.text_classification or options.multiple_choice):
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in options_given)
        where = "; a further classifier's options stand after its --head" if options.heads else ""
        raise RunError(f"{shown}: there are no texts of the default classifier{where}")


def record_of(options: argparse.Namespace) -> str:
    """Return what a run records of its further classifiers."""
    return str([{name: str(getattr(head, name)) for name in _RECORDED} for head in options.heads])


def label_config(
    hf: Mapping[str, Any],
    heads: Collection[Task],
    placed: Sequence[Placed],
    labels: Mapping[Task, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the keys of config.json that name the labels of all classifiers, and the default.

    Labels of classifiers that are not trained are the checkpoint's, as is the default's name unless
    another is given, or its labels are others.

    Args:
        heads: of the model.
        labels: the keys of each classifier that is trained.
    """
    records = {
        head: labels[head] if head in labels else head_record(hf, head)
        for head in heads
        if is_classifier(head)
    }
    name = default_name(hf)
    for each in placed:
        if each.task == CLASSIFICATION:
            has_same_labels = hf.get("id2label") == labels[each.task]["id2label"]
            name = each.name or (name if has_same_labels else None)
    return labels_config(records, name)


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


def selection_of(datasets: Sequence[Measured], options: argparse.Namespace) -> Selection:
    """Return the selection of the best validation; of several classifiers by their mean.

    Raises:
        RunError: of a figure of several the lowest is the best.
    """
    if len(datasets) == 1:
        selection = datasets[0].selection(options)
        figures = [selection.figure]
    else:
        classifiers = [one for one in datasets if isinstance(one, Classification)]
        figures = [one.figure for one in classifiers]
        if lowest := [figure for figure in figures if figure in LOWEST]:
            raise RunError(
                f"--metric {lowest[0]}: with several classifiers validated, the mean of their "
                "metrics decides, of which the highest is the best; take another"
            )
        chance = statistics.fmean(one.chance for one in classifiers)
        selection = Selection(figure=HEADS_MEAN, chance=chance, patience=options.patience)
    files = [each.validation for each in (options, *options.heads) if each.validation]
    selection.measured = "; ".join(map(describe_held_out, figures, files))
    return selection


def describe_held_out(figure: str, held_out: Sequence[Path]) -> str:
    """Describe a figure of held-out files by their names and their content."""
    hashes = "".join(sha256_of(file) for path in held_out for file in _files_at(path))
    content = hashlib.sha256(hashes.encode()).hexdigest()[:12]
    return f"{figure} of {', '.join(file_names(held_out))} (content {content})"


def _files_at(path: Path) -> list[Path]:
    """Return a file, or those of a folder: the held-out ones if its names tell splits."""
    of_split = files_of_split(path, "validation", suffixes=CHOICES) if path.is_dir() else []
    return of_split or find_files([path])
