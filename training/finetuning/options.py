"""Command-line options of text classification and of the hyperparameters of finetuning."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

from albert_serve.bundle.manifest import ProblemType
from albert_serve.tasks.question_answering.task import DEFAULT_MAX_SEQ_LEN
from training.data.labelled.errors import collecting, raise_listed
from training.data.labelled.folders import CHOICES, files_of_split, labelled_files
from training.data.labelled.race import RACE, race_files
from training.finetuning.recipes import DEFAULTS, with_defaults
from training.glue.files import training_files
from training.glue.tasks import TASKS, Metric
from training.run.heads import (
    add_heads,
    add_text_classification,
    each_head,
    head_parser,
    parse_with_heads,
)
from training.run.options import (
    add_columns,
    add_optimization,
    add_task,
    check_end,
    parse_count,
    parse_part,
    parse_positive,
    parse_seed,
    with_task_data,
)

_FIGURES: Final = ("loss", *get_args(Metric), "exact_match")


def add_classification(group: argparse._ArgumentGroup) -> None:
    """Add the options of the data of text classification, and of validation on it."""
    add = group.add_argument
    add_task(group)
    add_text_classification(group)
    _add_labels(group)
    add_heads(group)
    add(
        "--adaptive-depth",
        action="store_true",
        help="train a classifier after each layer, so that a text can be answered as soon as so "
        "many layers in a row agree",
    )
    add(
        "--teacher",
        help="a finetuned encoder of transformers, a folder or a name on the hub, whose logits "
        "replace the labels; --text-classification may then be .txt files, one text per line",
    )
    add(
        "--temperature",
        type=parse_positive,
        default=2.0,
        help="of the teacher's and the student's probabilities (%(default)s)",
    )
    add_columns(group)


def _add_labels(group: argparse._ActionsContainer) -> None:
    """Add the options of the labels of a classifier."""
    add = group.add_argument
    add(
        "--problem-type",
        choices=get_args(ProblemType),
        help="of those files: one label a text, any number of labels, or a number "
        "(single_label_classification)",
    )
    add("--labels", nargs="+", help="names of the labels 0, 1, ... of those files")
    add(
        "--class-weights",
        nargs="+",
        type=_parse_class_weight,
        metavar="WEIGHT",
        help="factors of the loss of each label, in their order; `balanced` weighs a label by the "
        "inverse of its frequency",
    )


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line of finetuning, with the data of its further classifiers in `heads`."""
    of_head = head_parser()
    _add_labels(of_head)
    _add_held_out(of_head)
    return parse_with_heads(parser, of_head, words)


def add_validation(group: argparse._ArgumentGroup) -> None:
    """Add the options of validation during training."""
    add = group.add_argument
    _add_held_out(group)
    add(
        "--validate-every",
        type=parse_count,
        help="steps between validations (an epoch); the end of the run is validated in any case",
    )
    add("--patience", type=parse_count, help="stop after so many validations without a new best")


def _add_held_out(group: argparse._ActionsContainer) -> None:
    """Add the options of the validation of a classifier."""
    add = group.add_argument
    add(
        "--validation",
        nargs="+",
        type=Path,
        help="held-out files of text classification or multiple choice, or else of question "
        "answering, measured during training; the best checkpoint is kept as `best` (with --task: "
        "val.tsv if there is one, or its dev files)",
    )
    add(
        "--metric",
        choices=_FIGURES,
        help="figure that decides which is the best (the task's; with several classifiers "
        "validated, their mean)",
    )


def add_hyperparameters(group: argparse._ArgumentGroup) -> None:
    """Add the options that a recipe has values for."""
    add = group.add_argument
    add(
        "--recipe",
        choices=("paper",),
        help="the paper's hyperparameters (table 14) of --task, or of --question-answering alone",
    )
    add(
        "--length",
        type=parse_count,
        help="maximum tokens of a sequence; by default of a question with its context "
        f"{DEFAULT_MAX_SEQ_LEN}, or the model's positions, and of others",
    )
    add(
        "--batch-size",
        nargs="+",
        type=parse_count,
        help="examples per step, of pretraining rows of --length tokens; one number, or one for "
        "each task in the order of --weights",
    )
    add(
        "--micro-batch-size",
        type=parse_count,
        help="maximum number of examples per forward pass, for less memory (all of a process)",
    )
    add("--dropout", type=parse_part, help="of hidden states and attention (the checkpoint's)")
    add("--classifier-dropout", type=parse_part, help="of pooled states (the checkpoint's)")
    add_optimization(group, {})
    add(
        "--seeds",
        nargs="+",
        type=parse_seed,
        metavar="SEED",
        help="train a run of each of these seeds in a folder of its own; one number N: N runs, "
        "from --seed on; one that collapses or diverges is replaced once",
    )
    for action in group._group_actions:
        if action.dest in DEFAULTS:
            value = DEFAULTS[action.dest]
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            action.help = f"{action.help} ({shown})"


def resolve(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options, and those of `heads`, with the files of the task and the recipe's values.

    Raises:
        RunError: options contradict each other, or the run has no end.
        CorpusError: files of tasks are missing; all are listed.
    """
    check_end(options)
    errors: list[str] = []
    options = with_task_data(options)
    with collecting(errors):
        options = _with_files(options)
    options = with_defaults(options)
    heads = []
    for head in each_head(options):
        with collecting(errors):
            heads.append(_with_files(head))
    raise_listed(errors)
    return argparse.Namespace(**{**vars(options), "heads": heads})


def _with_files(options: argparse.Namespace) -> argparse.Namespace:
    own = _files_in_folders(options) if options.task is None else _files_of_task(options)
    return argparse.Namespace(**{**vars(options), **own})


def _files_of_task(options: argparse.Namespace) -> dict[str, list[Path] | None]:
    """Return the files of the task by the options that they stand for."""
    if options.task == RACE:
        return _files_of_race(options)
    files = training_files(TASKS[options.task], options.data)
    validation = options.validation or files.validation
    return {"text_classification": files.train, "validation": validation}


def _files_of_race(options: argparse.Namespace) -> dict[str, list[Path] | None]:
    errors: list[str] = []
    train: list[Path] = []
    validation: list[Path] = options.validation or []
    with collecting(errors):
        train = race_files(options.data, "train")
    if not validation:
        with collecting(errors):
            validation = race_files(options.data, "dev")
    raise_listed(list(dict.fromkeys(errors)))  # both if the folder is none
    return {"multiple_choice": train, "validation": validation}


def _files_in_folders(options: argparse.Namespace) -> dict[str, list[Path] | None]:
    """Return the files in place of folders; a folder's own files of validation if none are given.

    Folders of multiple choice, which may have a file for each passage, stay folders.

    Raises:
        CorpusError: a folder has none.
    """
    train, validation = options.text_classification, options.validation
    if not train:
        return {"validation": validation or _with_validation(options.multiple_choice or [])}
    if validation is None and options.teacher is None:
        folders = [path for path in train if path.is_dir()]
        held_out = [file for folder in folders for file in files_of_split(folder, "validation")]
        validation = held_out or None
        if validation:
            print(f"validation on {', '.join(map(str, validation))}")
    return {
        "text_classification": labelled_files(train, "train"),
        "validation": validation and labelled_files(validation, "validation"),
    }


def _with_validation(paths: Sequence[Path]) -> list[Path] | None:
    """Return the folders that have files of validation of multiple choice; None if none has."""
    folders = [
        path
        for path in paths
        if path.is_dir() and files_of_split(path, "validation", suffixes=CHOICES)
    ]
    return folders or None


def _parse_class_weight(text: str) -> str | float:
    """Parse `balanced`, or a number above 0."""
    return text if text == "balanced" else parse_positive(text)
