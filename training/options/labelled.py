"""Labelled data on a command line: files, columns, and GLUE tasks, which are downloaded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final

from albert_serve.errors import HubError
from albert_serve.hub import HubModel, check_reachable, download, find_cached
from training.data.labelled.columns import Columns
from training.data.labelled.folders import RACE
from training.errors import RunError
from training.glue.files import patterns_of
from training.glue.tasks import TASKS, task_name
from training.model.checkpoint import CheckpointError
from training.options.flags import Options, flag, flag_name
from training.options.values import Parsed

# The commit is fixed, so that a resumed run reads the same files.
GLUE: Final = HubModel(
    repo_id="nyu-mll/glue",
    revision="bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c",
    repo_type="dataset",
)
# Options that describe the user's own files, whose values a task defines.
_OWN_FILES: Final = (
    *("text_classification", "multiple_choice", "problem_type", "labels"),
    *("text_column", "pair_column", "label_column", "label_separator", "choice_columns"),
    "delimiter",
)


def _parse_task(text: str) -> str:
    try:
        return RACE if text.lower() == RACE else task_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{error} Use one of {', '.join([*TASKS, RACE])}."
        ) from error


@dataclass(frozen=True, kw_only=True)
class LabelledTexts(Options, title="labelled texts"):
    """The files of a text classifier, and their columns.

    Attributes:
        task: GLUE task, or RACE, which is multiple choice.
        head: name of a classifier, after `--head`, or None for the default classifier.
    """

    task: Annotated[str, Parsed(_parse_task)] | None = flag(
        f"task of GLUE ({', '.join(task.title for task in TASKS.values())}), or RACE",
        metavar="NAME",
    )
    data: Path | None = flag(
        f"folder with the official files of --task (default: {GLUE.repo_id} of the Hugging Face "
        f"Hub; {GLUE.repo_id}@main for its newest version)",
        metavar="FOLDER",
    )
    text_classification: tuple[Path, ...] = flag(
        "text classification: CSV, TSV, JSONL or Parquet files, or folders", ()
    )
    text_column: str | None = flag(
        "column of the text (default: text, sentence, ...)", metavar="NAME"
    )
    pair_column: str | None = flag(
        "column of the second text of a pair (default: text_pair, sentence2, ...)", metavar="NAME"
    )
    label_column: tuple[str, ...] = flag(
        "column of the label, or one column of 0 and 1 per label (default: label, category, ...)",
        (),
        metavar="NAME",
    )
    label_separator: str | None = flag(
        "separator between several labels in one column", metavar="TEXT"
    )
    delimiter: str | None = flag(
        "delimiter of CSV files, one character (default: detected from the header)"
    )
    head: str | None = None

    def __post_init__(self) -> None:
        """Check the columns."""
        super().__post_init__()
        labels = self.label_column
        if len(labels) > 1 and self.label_separator is not None:
            raise RunError("--label-separator divides one column. Omit it, or name one column.")
        if len(set(labels)) < len(labels):
            raise RunError(
                f"--label-column {' '.join(labels)} repeats a column. Name each column once."
            )
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise RunError(
                f"--delimiter {self.delimiter!r} is not one character. Use a character such as ';'."
            )
        self._check_task()

    def _check_task(self) -> None:
        if self.task is None and self.data is not None:
            raise RunError(f"--data {self.data} is the folder of a task. Add --task.")
        if self.head is not None and (
            self.task == RACE or not (self.text_classification or self.task)
        ):
            raise RunError(
                f"--head {self.head} is a text classifier without data. Add --text-classification "
                "or a --task of GLUE after it."
            )
        if self.task is None:
            return
        if conflicts := [name for name in _OWN_FILES if getattr(self, name, None)]:
            names = ", ".join(map(flag_name, conflicts))
            raise RunError(f"--task has its own files, columns and labels. Omit {names}.")
        if self.task == RACE and self.data is None:
            raise RunError("--task RACE requires --data, the folder of its files.")

    @cached_property
    def task_folder(self) -> Path | None:
        """Folder of the task's files, which are downloaded if necessary, or None without a task."""
        source = _glue_of(self.data) if self.task in TASKS else None
        if source is None or self.task is None:
            return self.data
        try:
            return _download_task(source, self.task)
        except (HubError, CheckpointError) as error:
            reason = str(error).rstrip(".")
            raise RunError(
                f"{reason}. Use --data with a folder of the files of --task {self.task}."
            ) from error

    @property
    def columns(self) -> Columns:
        """Columns of the files."""
        labels = self.label_column
        return Columns(
            text=self.text_column,
            pair=self.pair_column,
            label=labels[0] if len(labels) == 1 else None,
            delimiter=self.delimiter,
            indicators=labels if len(labels) > 1 else (),
            separator=self.label_separator,
        )


ENTITIES_HELP: Final = (
    "texts with entities: JSONL or Parquet with tokens and ner_tags or tags, or with text and "
    "entities (start, end, label); CoNLL columns in other files"
)


@dataclass(frozen=True, kw_only=True)
class ChoiceFiles(Options, title="multiple choice"):
    """Multiple-choice files. `LabelledTexts` has the options for the files' other columns."""

    multiple_choice: tuple[Path, ...] = flag(
        "multiple choice: CSV, TSV, JSONL or Parquet files, RACE's files, or folders", ()
    )
    choice_columns: tuple[str, ...] = flag(
        "columns of the choices, or one column with a list; --text-column names the context, "
        "and --pair-column the question (default: choices, or ending0, ending1, ...)",
        (),
        metavar="NAME",
    )


def _glue_of(data: Path | None) -> HubModel | None:
    """Return the Hub repository of GLUE's files, or None if they are in a folder."""
    if data is None:
        return GLUE
    source = None if data.exists() else HubModel.parse(str(data))
    if source is None or source.repo_id != GLUE.repo_id:
        return None
    return replace(GLUE, revision=source.revision or GLUE.revision)


def _download_task(source: HubModel, task: str) -> Path:
    """Download the files of a GLUE task, and return their folder."""
    patterns = [f"{task}/{name}" for name in patterns_of(TASKS[task])]
    # Cached files are used only if the commit is fixed: a branch's files may have changed.
    cached = find_cached(source, patterns) if source == GLUE else None
    folder = cached or download(source, patterns)
    if not (folder / task).is_dir():
        check_reachable(source, task)
        raise CheckpointError(f"{source} has no files of {task}")
    return folder / task
