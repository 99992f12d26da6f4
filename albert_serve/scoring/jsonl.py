"""Files of lines, plain or compressed by their names' endings, that appear when they are whole."""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from albert_serve.errors import InvalidInputError


def read_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, each with its number from 1.

    Raises:
        InvalidInputError: the file is compressed, and damaged or incomplete.
        OSError: it cannot be read.
    """
    try:
        with _open_to_read(source) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise InvalidInputError(f"{source} is damaged or incomplete: {error}") from error


@contextmanager
def appearing(output: Path) -> Iterator[TextIO]:
    """A file to write that takes its name once it is complete, and is `.partial` until then.

    Raises:
        OSError: it cannot be written.
    """
    partial = output.with_name(output.name + ".partial")
    with _open_to_write(partial, output.suffix) as stream:
        yield stream
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(output)


def _open_to_read(path: Path) -> gzip.GzipFile | lzma.LZMAFile | BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path)
    return lzma.open(path) if path.suffix == ".xz" else path.open("rb")


def _open_to_write(path: Path, suffix: str) -> TextIO:
    # JSON's own escape for half of a surrogate pair, which an id may hold.
    encoding, errors = "utf-8", "backslashreplace"
    if suffix == ".gz":
        return gzip.open(path, "wt", encoding=encoding, errors=errors)
    if suffix == ".xz":
        return lzma.open(path, "wt", encoding=encoding, errors=errors)
    return path.open("w", encoding=encoding, errors=errors)
