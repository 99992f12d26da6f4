"""The files that a job reads: by paths, globs and folders, with the columns that folders name."""

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
# One slash of s3:// is left in a `Path`; a letter alone is a drive.
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_local(name: str | Path) -> None:
    """Check that a name is not the address of an object store or a host."""
    if _ADDRESS.match(str(name)):
        raise InvalidInputError(
            f"{name} is an address, but jobs read and write local files. Copy the data to this "
            "machine, or mount its store."
        )


def find_inputs(patterns: Sequence[str | Path], output: Path) -> list[tuple[Path, Path | None]]:
    """Return the files that paths, globs and folders name, in order; `-` is stdin.

    Globs and folders are in alphabetical order; a folder's files are those whose names tell a
    format. What wildcards and folders find is without names that begin with a dot or `_`, the
    parts of jobs (`*.parts/`), and what lies in the output. It comes with the folder that was
    named, or the one above the first wildcard.
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
                    f"{path} has no file that ends in .jsonl, .csv, .tsv, .parquet or .arrow"
                )
            files += [(file, path) for file in matches]
        elif not path.exists() and _GLOB_CHARACTERS & set(pattern):
            above = next(it for it in path.parents if not _GLOB_CHARACTERS & set(str(it)))
            matches = _inputs(map(Path, glob.glob(pattern, recursive=True)), above, output)
            if not matches:
                raise InvalidInputError(f"no file matches {pattern}")
            files += [(file, above) for file in matches]
        elif not path.exists():
            raise InvalidInputError(f"{path} does not exist.")
        else:
            files.append((path, None))
    for file, count in Counter(Path(os.path.abspath(file)) for file, _ in files).items():
        if count > 1:
            raise InvalidInputError(f"the input names {file} {count} times. Name it once.")
    return files


def _inputs(files: Iterable[Path], folder: Path, output: Path) -> list[Path]:
    return sorted(file for file in files if _is_input(file, folder, output))


def _is_input(file: Path, folder: Path, output: Path) -> bool:
    parts = file.relative_to(folder).parts
    # Nor what another job has not finished.
    is_hidden = any(part.startswith((".", "_")) or part.endswith(".parts") for part in parts)
    return not (file.is_dir() or is_hidden or output.resolve() in file.resolve().parents)


def partition_columns(files: Sequence[tuple[Path, Path | None]]) -> list[dict[str, Any]]:
    """Return the columns that each file's folders name, such as day=2024-01-01/, with their value.

    Values are scalars of pyarrow, as `pyarrow.dataset` reads Hive's folders: a column is int32 if
    it has such numbers only, else text.

    Args:
        files: paths, each with the folder below which folders name columns, if there is one.
    """
    folders = [Path() if above is None else path.parent.relative_to(above) for path, above in files]
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
    from pyarrow import dataset  # it takes 70 MB of memory, so only jobs over such folders load it

    hive = dataset.partitioning(pa.schema(types), flavor="hive")
    # The last part is that of a file.
    paths = [(folder / "_").as_posix() for folder in folders]
    found = [dataset.get_partition_keys(hive.parse(path)) for path in paths]
    return [{name: values[name] for name in types if name in values} for values in found]


def _type_of(texts: Sequence[str | None]) -> Any:
    try:
        pa.array(texts, pa.string()).cast(pa.int32())
    except pa.ArrowInvalid:
        return pa.string()
    return pa.int32() if any(texts) else pa.string()
