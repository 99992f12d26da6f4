"""The files of a job's input: paths, globs and folders."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from albert_serve.errors import InvalidInputError
from albert_serve.tables import has_known_suffix

_STDIN: Final = "/dev/stdin"
_GLOB_CHARACTERS: Final = frozenset("*?[")


def find_inputs(patterns: Sequence[str | Path], output: Path | None = None) -> list[Path]:
    """Return the files that paths, globs and folders name, in order, each once; `-` is stdin.

    Globs and folders are in alphabetical order; a folder's files are those whose names tell a
    format. What wildcards and folders find is without names that begin with a dot or `_`, the
    parts of jobs (`*.parts/`), and what lies in the output.

    Raises:
        InvalidInputError: a folder or a glob has no file.
        FileNotFoundError: a path does not exist.
    """
    files: list[Path] = []
    for pattern in map(str, patterns):
        path = Path(_STDIN if pattern == "-" else pattern)
        if path.is_dir():
            matches = [file for file in sorted(path.rglob("*")) if _is_data(file, path, output)]
            if not matches:
                raise InvalidInputError(
                    f"{path} has no file that ends in .jsonl, .csv, .tsv or .parquet"
                )
        elif not path.exists() and _GLOB_CHARACTERS & set(pattern):
            matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
            fixed = _fixed_folder(path)
            matches = [file for file in matches if _is_input(file, fixed, output)]
            if not matches:
                raise InvalidInputError(f"no file matches {pattern}")
        else:
            path.stat()
            matches = [path]
        files += matches
    return list(dict.fromkeys(files))


def _fixed_folder(pattern: Path) -> Path:
    """Return the folder above a pattern's first wildcard."""
    return next(folder for folder in pattern.parents if not _GLOB_CHARACTERS & set(str(folder)))


def _is_data(file: Path, folder: Path, output: Path | None) -> bool:
    return file.is_file() and _is_input(file, folder, output) and has_known_suffix(file)


def _is_input(file: Path, folder: Path, output: Path | None) -> bool:
    parts = file.relative_to(folder).parts
    # Nor what another job has not finished.
    is_hidden = any(part.startswith((".", "_")) or part.endswith(".parts") for part in parts)
    is_output = output is not None and output.resolve() in file.resolve().parents
    return not file.is_dir() and not is_hidden and not is_output
