"""The files of a GLUE task in a folder, with the official names or the Hub's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from training.data.corpus import CorpusError
from training.data.labelled.rows import raise_listed
from training.glue.tasks import GlueTask

_COMPRESSED: Final = ("", ".gz", ".bz2", ".xz", ".zst")
_PARQUET: Final = ".parquet"
# Pattern of the training files' names on the Hub.
_HUB_TRAIN: Final = f"train-*{_PARQUET}"
# A user may split these files off the training files, to keep the official held-out files.
_VALIDATION: Final = ("val.tsv", "validation.tsv")


class TrainingFiles(NamedTuple):
    """The training files of a task, and the files for validation during training."""

    train: list[Path]
    validation: list[Path]


def patterns_of(task: GlueTask) -> list[str]:
    """Return the patterns of a task's files in its folder of the Hub's repository."""
    held_out = (pattern for patterns in _dev(task).values() for pattern in patterns)
    tests = (pattern for patterns in task.test.values() for pattern in patterns)
    return [name for name in (_HUB_TRAIN, *held_out, *tests) if name.endswith(_PARQUET)]


def _dev(task: GlueTask) -> dict[str, tuple[str, ...]]:
    """Return the patterns of each held-out split, including the Hub's names."""
    has_one = len(task.dev) == 1
    return {
        split: (*patterns, f"validation{'' if has_one else f'_{split}'}-*{_PARQUET}")
        for split, patterns in task.dev.items()
    }


def training_files(task: GlueTask, folder: Path) -> TrainingFiles:
    """Find the files of a task in a folder.

    Validation uses `val.tsv` if it exists, or else the first official held-out split.
    """
    train = find_first(folder, (*task.train, _HUB_TRAIN))
    first = next(iter(task.dev))
    validation = find_first(folder, _VALIDATION) or find_first(folder, _dev(task)[first])
    missing = [] if train else [_missing(folder, "training", task.train)]
    if not validation:
        missing.append(_missing(folder, "held-out", task.dev[first]))
    raise_listed(missing)
    return TrainingFiles(train=train, validation=validation)


def dev_files(task: GlueTask, folder: Path) -> dict[str, list[Path]]:
    """Find the held-out files of each split of a task in a folder."""
    files = {split: find_first(folder, patterns) for split, patterns in _dev(task).items()}
    missing = [patterns for split, patterns in task.dev.items() if not files[split]]
    raise_listed([_missing(folder, "held-out", patterns) for patterns in missing])
    return files


def find_first(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files of the first pattern with a match, compressed or not."""
    if not folder.is_dir():
        raise CorpusError(f"{folder} is not a folder. Use the folder of the task's files.")
    names = (pattern + suffix for pattern in patterns for suffix in _COMPRESSED)
    return next((files for name in names if (files := sorted(folder.glob(name)))), [])


def _missing(folder: Path, kind: str, patterns: Sequence[str]) -> str:
    return f"{folder} has no {kind} file {' or '.join(patterns)}."
