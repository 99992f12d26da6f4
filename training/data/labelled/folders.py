"""Files of labelled texts and questions in folders, selected by the split in their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from training.data.corpus import CorpusError, find_files

# Name of RACE in --task.
RACE: Final = "race"

_Split: TypeAlias = Literal["train", "validation", "test"]

_TABLES: Final = frozenset({".csv", ".tsv", ".jsonl", ".parquet", ".arrow"})
# Suffixes of multiple-choice files. The original files of RACE are .txt.
CHOICES: Final = _TABLES | {".txt"}
# Maximum number of file names to print.
_MAX_PRINTED: Final = 8
# Words in file and folder names that give the split, as in `datasets`.
_WORDS_OF: Final[Mapping[_Split, frozenset[str]]] = MappingProxyType(
    {
        "train": frozenset({"train", "training"}),
        "validation": frozenset({"validation", "valid", "dev", "val"}),
        "test": frozenset({"test", "testing", "eval", "evaluation"}),
    }
)
_WORD: Final = re.compile(r"[a-z]+")


def labelled_files(
    paths: Sequence[Path], *splits: _Split, suffixes: frozenset[str] = _TABLES
) -> list[Path]:
    """Return the files among `paths`, and the files with one of the suffixes in each folder.

    If names in a folder contain splits, only the files of one split are returned: the first of
    `splits` that the folder has. Files without a split in their names then belong to training.
    Otherwise, all files are returned.
    """
    files: list[Path] = []
    for path in paths:
        files += _files_in(path, splits, suffixes) if path.is_dir() else [path]
    return files


def files_of_split(
    folder: Path, split: _Split, *, suffixes: frozenset[str] = _TABLES
) -> list[Path]:
    """Return the files of a split in a folder, if there are any."""
    files = _readable(folder, suffixes)
    return [file for file in files if (_split_of(file, folder) or "train") == split]


def _files_in(folder: Path, splits: Sequence[_Split], suffixes: frozenset[str]) -> list[Path]:
    files = _readable(folder, suffixes)
    if not files:
        raise CorpusError(f"{folder} has no file with the suffix {', '.join(sorted(suffixes))}.")
    split_of = {file: _split_of(file, folder) for file in files}
    if not any(split_of.values()):
        return files
    by_split: dict[_Split, list[Path]] = {}
    for file, split in split_of.items():
        by_split.setdefault(split or "train", []).append(file)
    chosen: list[Path] = next((by_split[split] for split in splits if split in by_split), [])
    if not chosen:
        raise CorpusError(
            f"{folder} has files for {', '.join(by_split)}, but none for {' or '.join(splits)}."
        )
    names = ", ".join(str(file.relative_to(folder)) for file in chosen[:_MAX_PRINTED])
    num_more = len(chosen) - _MAX_PRINTED
    more = f" and {num_more:,} more" if num_more > 0 else ""
    print(f"{folder}: {names}{more} of {len(files):,} files")
    return chosen


def _readable(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    try:
        return [file for file in find_files([folder]) if suffixes & set(file.suffixes)]
    except CorpusError:  # raised if the folder contains no file
        return []


def _split_of(file: Path, folder: Path) -> _Split | None:
    """Return the split in the name of a file or one of its folders, or None if there is none."""
    for part in reversed(file.relative_to(folder).parts):
        words = set(_WORD.findall(part.lower()))
        for split, split_words in _WORDS_OF.items():
            if words & split_words:
                return split
    return None


def race_files(folder: Path, split: Literal["train", "dev"]) -> list[Path]:
    """Return the files of a RACE split, or its folder (Lai et al. 2017).

    The official archive has a folder for each split, with `train/middle/*.txt` and so on. Passages
    may also be in files such as `train.middle.jsonl`, one passage per line.
    """
    if not folder.is_dir():
        raise CorpusError(f"{folder} is not a folder. Pass the folder of the task's files.")
    if (folder / split).is_dir():
        return [folder / split]
    files = sorted(folder.glob(f"{split}*.jsonl*"))
    if not files:
        kind = "training" if split == "train" else "held-out"
        raise CorpusError(f"{folder} has no {kind} files {split}/ or {split}*.jsonl.")
    return files
