"""Line files, plain or compressed by suffix, and atomic writing."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from albert_serve.errors import InvalidInputError
from albert_serve.files import partial_path, put_in_place


def read_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, each with its number from 1.

    Raises:
        InvalidInputError: the compressed file is damaged or incomplete.
        OSError: the file cannot be read.
    """
    try:
        with _open_to_read(source) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise InvalidInputError(f"{source} is damaged or incomplete: {error}") from error


@contextmanager
def write_atomically(output: Path) -> Iterator[TextIO]:
    """Open a file to write, named `.partial` until it is complete.

    Raises:
        OSError: the file cannot be written.
    """
    partial = partial_path(output)
    with _open_to_write(partial, output.suffix) as stream:
        yield stream
    put_in_place(partial, output)


def _open_to_read(path: Path) -> gzip.GzipFile | lzma.LZMAFile | BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path)
    return lzma.open(path) if path.suffix == ".xz" else path.open("rb")


def _open_to_write(path: Path, suffix: str) -> TextIO:
    # Writes a lone surrogate, which an id may contain, as its JSON escape.
    encoding, errors = "utf-8", "backslashreplace"
    if suffix == ".gz":
        return gzip.open(path, "wt", encoding=encoding, errors=errors)
    if suffix == ".xz":
        return lzma.open(path, "wt", encoding=encoding, errors=errors)
    return path.open("w", encoding=encoding, errors=errors)
