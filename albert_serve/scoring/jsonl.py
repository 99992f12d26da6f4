"""Line files, plain or compressed by suffix: bounded reading, and atomic writing."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import secrets
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Final, TextIO

from albert_serve.errors import InvalidInputError
from albert_serve.files import put_in_place

MAX_LINE_BYTES: Final = 16 << 20
_STDOUT: Final = 1
# Formats that people have tables in, by their files' suffixes or first bytes.
_TABLES: Final = {".csv": "CSV", ".tsv": "TSV", ".parquet": "Parquet", ".xlsx": "Excel"}
_MAGIC: Final = {b"PAR1": "Parquet", b"PK\x03\x04": "Zip", b"\x28\xb5\x2f\xfd": "Zstandard"}


def read_lines(source: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank, each with its number from 1; None for one too long.

    Raises:
        InvalidInputError: the file is a table of another format, or is damaged or incomplete.
        OSError: the file cannot be read.
    """
    try:
        with _open_to_read(source) as stream:
            _check_format(source, stream)
            for number, line in enumerate(_bounded_lines(stream), start=1):
                if line is None or line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise InvalidInputError(f"{source} is damaged or incomplete: {error}") from error


@contextmanager
def write_lines(output: Path) -> Iterator[TextIO]:
    """Open a file to write.

    A regular file is replaced when it is complete, and until then stays as it is. A pipe, a device
    or the standard output is written to at once.

    Raises:
        OSError: the file cannot be written.
    """
    with _open_output(output) as raw, _encoder(raw, output.suffix) as stream:
        yield stream


def is_stdout(path: Path) -> bool:
    """Whether a path is where the standard output goes, such as /dev/stdout."""
    try:
        return os.path.samestat(os.fstat(_STDOUT), path.stat())
    except OSError:
        return False


def _open_output(output: Path) -> AbstractContextManager[BinaryIO]:
    if is_stdout(output):
        sys.stdout.flush()
        # With its own position: opening the path again would begin at the file's start.
        return open(os.dup(_STDOUT), "wb")
    if output.exists() and not output.is_file():
        return output.open("wb")
    return _replace(output.resolve())


@contextmanager
def _replace(output: Path) -> Iterator[BinaryIO]:
    """Open a new file beside `output` that takes its place when it is complete."""
    # Nobody can have made a file or a link of a name that nobody knows.
    partial = output.with_name(f"{output.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as stream:
            yield stream
        put_in_place(partial, output)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _check_format(source: Path, stream: io.BufferedReader) -> None:
    """Refuse a file of another format by its name or its first bytes."""
    suffixes = {suffix.lower() for suffix in source.suffixes[-2:]}
    names = [name for suffix, name in _TABLES.items() if suffix in suffixes]
    beginning = stream.peek(4)[:4]
    names += [name for magic, name in _MAGIC.items() if beginning == magic]
    if names:
        raise InvalidInputError(
            f"{source} is {names[0]}; the input must be JSONL, one JSON object a line, such as "
            '{"id": 1, "text": "..."}'
        )


def _bounded_lines(stream: io.BufferedReader) -> Iterator[bytes | None]:
    """Yield the lines; None for one of more than `MAX_LINE_BYTES`, which is passed over."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        yield None


def _open_to_read(path: Path) -> io.BufferedReader:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path))
    return io.BufferedReader(lzma.open(path)) if path.suffix == ".xz" else path.open("rb")


@contextmanager
def _encoder(raw: BinaryIO, suffix: str) -> Iterator[TextIO]:
    """Return a text stream that ends with its `with`, and leaves `raw` open."""
    compressed: BinaryIO | gzip.GzipFile | lzma.LZMAFile = raw
    if suffix == ".gz":
        compressed = gzip.GzipFile(fileobj=raw, mode="wb", filename="")
    elif suffix == ".xz":
        compressed = lzma.LZMAFile(raw, "wb")  # noqa: SIM115  # closed below
    # Writes a lone surrogate, which an id may contain, as its JSON escape.
    stream = io.TextIOWrapper(compressed, encoding="utf-8", errors="backslashreplace")
    try:
        yield stream
    except BaseException:
        stream.detach()
        raise
    stream.flush()
    stream.detach()
    if compressed is not raw:
        compressed.close()
