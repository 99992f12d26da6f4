"""Formats of data files by name and content, and their lines, plain or compressed, as streams."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeAlias, cast, get_args

from albert_serve.errors import ConfigError, InvalidInputError, how_to_install

Format: TypeAlias = Literal["jsonl", "csv", "tsv", "parquet", "arrow"]
WRITTEN_FORMATS: Final[tuple[Format, ...]] = ("jsonl", "csv", "tsv", "parquet")

MAX_LINE_BYTES: Final = 16 << 20
_SUFFIXES: Final[dict[str, Format]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COLUMNAR_MAGIC: Final[dict[bytes, Format]] = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",  # a stream
}
_COMPRESSION_MAGIC: Final = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
}
_OPENERS: Final[dict[str, Callable[..., Any]]] = {
    ".gz": partial(gzip.open, compresslevel=6),
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_ZIP_MAGIC: Final = b"PK\x03\x04"
# UTF-16 is recognised by its byte order mark, or by ASCII characters at the beginning.
_UTF_16: Final = {
    "utf-16": re.compile(rb"\xff\xfe|\xfe\xff").match,
    "utf-16-le": re.compile(rb"([^\0]\0){4}").match,
    "utf-16-be": re.compile(rb"(\0[^\0]){4}").match,
}
_DAMAGE: Final = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableType:
    """A format, and its compression: a suffix such as ".gz", or the empty string."""

    format: Format
    compression: str = ""

    @property
    def has_columns(self) -> bool:
        """Whether all rows have the same columns."""
        return self.format != "jsonl"

    @property
    def is_columnar(self) -> bool:
        """Whether pyarrow reads the file, in typed columns."""
        return self.format in ("parquet", "arrow")

    @property
    def suffix(self) -> str:
        """The suffix of a file of this type."""
        return f".{self.format}{self.compression}"


def type_by_name(name: str, chosen: Format | None = None) -> TableType:
    """Return the type of a file by its name (default: JSONL).

    Args:
        chosen: requested format, which replaces the name's.
    """
    suffixes = [suffix.lower() for suffix in Path(name).suffixes[-2:]]
    compression = suffixes[-1] if suffixes and suffixes[-1] in _COMPRESSION_MAGIC.values() else ""
    formats = [_SUFFIXES[suffix] for suffix in suffixes if suffix in _SUFFIXES]
    kind = TableType(
        format=chosen or (formats[-1] if formats else "jsonl"), compression=compression
    )
    if kind.is_columnar and compression:
        raise ConfigError(f"{name}: {kind.format} is already compressed. Name it .{kind.format}.")
    return kind


def has_known_suffix(path: Path) -> bool:
    """Return whether a file's name has the suffix of a format."""
    return any(suffix.lower() in _SUFFIXES for suffix in path.suffixes[-2:])


def detect_type(path: Path, chosen: Format | None = None) -> TableType:
    """Return the type of an input file by its name and its first bytes."""
    kind = type_by_name(path.name, chosen)
    if is_stream(path):
        return kind
    try:
        with path.open("rb") as stream:
            beginning = stream.read(8)
    except FileNotFoundError as error:
        raise InvalidInputError(f"{path} does not exist.") from error
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from error
    is_excel = path.suffix.lower() in (".xlsx", ".xls") or beginning.startswith(_ZIP_MAGIC)
    if is_excel and chosen is None:
        raise InvalidInputError(
            f"{path} is an Excel or Zip file. Save it as one of {', '.join(get_args(Format))}."
        )
    for magic, columnar_format in _COLUMNAR_MAGIC.items():
        if beginning.startswith(magic):
            return TableType(format=columnar_format)
    suffixes = [
        suffix for magic, suffix in _COMPRESSION_MAGIC.items() if beginning.startswith(magic)
    ]
    return TableType(format=kind.format, compression=suffixes[0] if suffixes else "")


def is_stream(path: Path) -> bool:
    """Return whether a path is a pipe or a device, which can be read or written only once."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


class Lines(NamedTuple):
    """An open file of lines.

    Attributes:
        stream: text of the file, with lone surrogates for bytes that are not UTF-8 (`is_utf8`).
        beginning: first characters of the stream.
        position: function that returns the number of bytes read from disk.
    """

    stream: io.TextIOWrapper
    beginning: str
    position: Callable[[], int]

    def bounded(self) -> Iterator[str | None]:
        """Yield the lines, with None in place of a line of more than `MAX_LINE_BYTES`."""
        while line := self.stream.readline(MAX_LINE_BYTES + 1):
            if len(line) <= MAX_LINE_BYTES:
                yield line
                continue
            while line and not line.endswith("\n"):
                line = self.stream.readline(MAX_LINE_BYTES)
            yield None

    def checked(self, path: Path) -> Iterator[str]:
        """Yield the lines. A line of more than `MAX_LINE_BYTES` is an error."""
        for number, line in enumerate(self.bounded(), start=1):
            if line is None:
                raise InvalidInputError(
                    f"{path}, line {number} has more than {MAX_LINE_BYTES} bytes. Split it."
                )
            yield line


@contextmanager
def open_lines(path: Path, compression: str = "") -> Iterator[Lines]:
    """Open a file of lines in UTF-8, or in UTF-16 with a byte order mark or ASCII at its beginning.

    Lines end in LF or CR LF, or in CR if the beginning of the file has no LF.
    """
    with path.open("rb") as raw:
        try:
            stream = _decompressed(raw, compression)
            beginning = stream.peek(1)
            encoding = next((name for name, is_it in _UTF_16.items() if is_it(beginning)), "")
            has_cr = b"\r" in beginning[:-1] and b"\n" not in beginning
            text = io.TextIOWrapper(
                stream,
                encoding or "utf-8-sig",
                errors="strict" if encoding else "surrogateescape",
                newline=None if has_cr else "\n",
            )
            start = beginning.decode(text.encoding, errors="replace")
            yield Lines(text, start, raw.tell if raw.seekable() else lambda: 0)
        except UnicodeDecodeError as error:
            raise damaged(path, f"it is not {encoding}: {error.reason}") from error
        except _DAMAGE as error:
            raise damaged(path, error) from error
        except OSError as error:
            # Errors of bz2 and pyarrow about the content have no error number.
            if error.errno is not None:
                raise
            raise damaged(path, error) from error


def _decompressed(raw: io.BufferedReader, compression: str) -> io.BufferedReader:
    if compression == ".zst":
        pa = import_pyarrow("pyarrow", ".zst")
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"))
    return io.BufferedReader(_OPENERS[compression](raw, "rb")) if compression else raw


def damaged(path: Path, reason: Exception | str) -> InvalidInputError:
    """Return the error of a file that a library cannot read."""
    text = reason if isinstance(reason, str) else first_line(reason)
    return InvalidInputError(f"{path} is damaged or incomplete: {text.removesuffix('.')}.")


def first_line(error: Exception) -> str:
    """Return the first line of a library's message, or the error's type if there is none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def import_pyarrow(name: str, purpose: str) -> Any:
    """Return a module of pyarrow."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{purpose} needs pyarrow. Run {how_to_install('score')}.") from error


def is_utf8(text: str) -> bool:
    """Return whether a text has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def compressor(raw: BinaryIO, compression: str) -> BinaryIO:
    """Return a stream that compresses into `raw`. A file may consist of several such streams."""
    stream: Any = raw
    if compression == ".zst":
        pa = import_pyarrow("pyarrow", ".zst")
        stream = pa.CompressedOutputStream(pa.PythonFile(raw, "w"), "zstd")
    elif compression:
        stream = _OPENERS[compression](raw, "wb")
    return cast("BinaryIO", stream)
