"""The files that a job reads: by paths, globs and folders, with the columns that folders name."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
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
# A null in the name of a folder of Hive.
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_INTEGER: Final = re.compile(r"-?[0-9]{1,10}")
_MAX_INTEGER: Final = (1 << 31) - 1


def check_local(name: str | Path) -> None:
    """Check that a name is not the address of an object store or a host.

    Raises:
        InvalidInputError: it is one.
    """
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

    Raises:
        InvalidInputError: a folder or a glob has no file, a file is named twice, or a name is an
            address.
        FileNotFoundError: a path does not exist.
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
        else:
            path.stat()
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
    texts = [_texts(path, folder) for path, folder in files]
    names = dict.fromkeys(name for values in texts for name in values)
    types = {name: _type_of(values.get(name) for values in texts) for name in names}
    return [{name: _scalar(text, types[name]) for name, text in values.items()} for values in texts]


def _texts(path: Path, folder: Path | None) -> dict[str, str | None]:
    parts = () if folder is None else path.relative_to(folder).parts[:-1]
    values: dict[str, str | None] = {}
    for part in parts:
        name, sign, text = part.partition("=")
        if name and sign:
            values[unquote(name)] = None if text == _NULL else unquote(text)
    return values


def _type_of(texts: Iterable[str | None]) -> Any:
    known = [text for text in texts if text is not None]
    return pa.int32() if known and all(map(_is_integer, known)) else pa.string()


def _is_integer(text: str) -> bool:
    return bool(_INTEGER.fullmatch(text)) and -_MAX_INTEGER - 1 <= int(text) <= _MAX_INTEGER


def _scalar(text: str | None, kind: Any) -> Any:
    return pa.scalar(int(text) if text is not None and kind == pa.int32() else text, kind)
