"""Find the files of a job by paths, globs and folders, and the columns that folders name."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa

from albert_serve.errors import InvalidInputError
from albert_serve.tables.columnar import is_dataset_metadata
from albert_serve.tables.formats import has_known_suffix

_STDIN: Final = "/dev/stdin"
_GLOB_CHARACTERS: Final = frozenset("*?[")
# This expects one slash, because `Path` shortens s3:// to s3:/. A single letter would be a drive.
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_local(name: str | Path) -> None:
    """Check that a name is not the address of an object store or a host."""
    if _ADDRESS.match(str(name)):
        raise InvalidInputError(
            f"{name} is an address, but jobs read and write local files. Copy the data to this "
            "machine, or mount its store."
        )


def find_inputs(patterns: Sequence[str | Path], output: Path) -> list[tuple[Path, Path | None]]:
    """Return the input files in order, each with the folder below which folders name columns.

    That folder is the input itself or the folder above the first wildcard, or None for a single
    file. Files of globs and folders are in alphabetical order. Folders contribute files whose
    suffix is a known format. Globs and folders ignore names that begin with a dot or `_`, parts of
    jobs (`*.parts/`), and files in the output folder.

    Args:
        patterns: paths, globs and folders, or `-` for stdin.
        output: output of the job.
    """
    files: list[tuple[Path, Path | None]] = []
    for pattern in map(str, patterns):
        check_local(pattern)
        path = Path(_STDIN if pattern == "-" else pattern)
        if path.is_dir():
            matches = [
                file
                for file in path.rglob("*")
                if has_known_suffix(file) and not is_dataset_metadata(file)
            ]
            matches = _inputs(matches, path, output)
            if not matches:
                raise InvalidInputError(
                    f"{path} has no file that ends in .jsonl, .csv, .tsv, .parquet or .arrow."
                )
            files += [(file, path) for file in matches]
        elif not path.exists() and _GLOB_CHARACTERS & set(pattern):
            folder = next(above for above in path.parents if not _GLOB_CHARACTERS & set(str(above)))
            matches = _inputs(map(Path, glob.glob(pattern, recursive=True)), folder, output)
            if not matches:
                raise InvalidInputError(f"No file matches {pattern}.")
            files += [(file, folder) for file in matches]
        elif not path.exists():
            raise InvalidInputError(f"{path} does not exist.")
        else:
            files.append((path, None))
    for file, count in Counter(Path(os.path.abspath(file)) for file, _ in files).items():
        if count > 1:
            raise InvalidInputError(f"The input names {file} {count} times. Name it once.")
    return files


def _inputs(files: Iterable[Path], folder: Path, output: Path) -> list[Path]:
    return sorted(file for file in files if _is_input(file, folder, output))


def _is_input(file: Path, folder: Path, output: Path) -> bool:
    parts = file.relative_to(folder).parts
    # The parts of an unfinished job are not input.
    is_hidden = any(part.startswith((".", "_")) or part.endswith(".parts") for part in parts)
    return not (file.is_dir() or is_hidden or output.resolve() in file.resolve().parents)


def partition_columns(files: Sequence[tuple[Path, Path | None]]) -> list[dict[str, Any]]:
    """Return the columns that each file's folders name, such as day=2024-01-01/.

    Values are pyarrow scalars, as in `pyarrow.dataset` with Hive's folders: a column is int32 if
    all values are such numbers, otherwise text.

    Args:
        files: files of `find_inputs`.
    """
    folders = [Path() if root is None else file.parent.relative_to(root) for file, root in files]
    names = {
        unquote(part.partition("=")[0]): pa.string()
        for folder in folders
        for part in folder.parts
        if "=" in part[1:]
    }
    if not names:
        return [{} for _ in files]
    rows = _partitions(folders, names)
    types = {name: _type_of([row[name] for row in rows if name in row]) for name in names}
    return [
        {name: pa.scalar(value, types[name]) for name, value in row.items()}
        for row in _partitions(folders, types)
    ]


def _partitions(folders: Sequence[Path], types: Mapping[str, Any]) -> list[dict[str, Any]]:
    from pyarrow import dataset  # imported only if needed, because it takes 70 MB of memory

    hive = dataset.partitioning(pa.schema(types), flavor="hive")
    # The parser expects a file as the last component of a path, and ignores it.
    paths = [(folder / "_").as_posix() for folder in folders]
    partitions = [dataset.get_partition_keys(hive.parse(path)) for path in paths]
    return [{name: values[name] for name in types if name in values} for values in partitions]


def _type_of(texts: Sequence[str | None]) -> Any:
    try:
        pa.array(texts, pa.string()).cast(pa.int32())
    except pa.ArrowInvalid:
        return pa.string()
    return pa.int32()
