"""The formats of files: recognised by name or content, plain or compressed, bounded reading."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final, Literal, TypeAlias, cast, get_args

from albert_serve.errors import ConfigError, InvalidInputError, how_to_install

Format: TypeAlias = Literal["jsonl", "csv", "tsv", "parquet"]

MAX_LINE_BYTES: Final = 16 << 20
DELIMITERS: Final = {"csv": ",", "tsv": "\t"}
STDIN, STDOUT = "/dev/stdin", "/dev/stdout"
_SUFFIXES: Final[dict[str, Format]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_COMPRESSIONS: Final = (".gz", ".bz2", ".xz", ".zst")
# Tables that are not read, by their files' suffixes or first bytes.
_REFUSED_SUFFIXES: Final = {".xlsx": "Excel", ".xls": "Excel"}
_REFUSED_MAGIC: Final = {b"PK\x03\x04": "Zip or Excel"}
_UTF_16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")
_PARQUET_MAGIC: Final = b"PAR1"
_MAGIC: Final = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
}
# A frame's content can be ten thousands of times as large as what is read of it.
_ZSTD_READ_BYTES: Final = 1 << 9
_COMPRESSION_ERRORS: Final = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileType:
    """A format, and its compression: a suffix such as ".gz", or none."""

    format: Format
    compression: str = ""

    @property
    def is_table(self) -> bool:
        """Whether all rows have the same columns."""
        return self.format != "jsonl"

    @property
    def suffix(self) -> str:
        """The suffix of a file of this type."""
        return f".{self.format}{self.compression}"


def type_by_name(name: str, chosen: Format | None = None) -> FileType:
    """Return the type of a file by its name; JSONL if the name does not tell.

    Args:
        chosen: the format, whatever the name.

    Raises:
        ConfigError: Parquet is named as compressed.
    """
    suffixes = [suffix.lower() for suffix in Path(name).suffixes[-2:]]
    compression = suffixes[-1] if suffixes and suffixes[-1] in _COMPRESSIONS else ""
    named = [_SUFFIXES[suffix] for suffix in suffixes if suffix in _SUFFIXES]
    form: Format = chosen or (named[-1] if named else "jsonl")
    if form == "parquet" and compression:
        raise ConfigError(f"{name}: Parquet is compressed inside; name it .parquet")
    return FileType(format=form, compression=compression)


def has_known_suffix(path: Path) -> bool:
    """Whether a file's name tells its format."""
    return any(suffix.lower() in _SUFFIXES for suffix in path.suffixes[-2:])


def detect_type(path: Path, chosen: Format | None = None) -> FileType:
    """Return the type of an input file, by its name and its first bytes.

    Raises:
        InvalidInputError: it is of a format or an encoding that is not read.
        OSError: the file cannot be read.
    """
    named = type_by_name(path.name, chosen)
    if is_stream(path):
        return named
    with path.open("rb") as stream:
        beginning = stream.read(8)
    refused = [kind for suffix, kind in _REFUSED_SUFFIXES.items() if path.suffix.lower() == suffix]
    refused += [kind for magic, kind in _REFUSED_MAGIC.items() if beginning.startswith(magic)]
    if refused and chosen is None:
        raise InvalidInputError(
            f"{path} is {refused[0]}; the input must be {', '.join(get_args(Format))}"
        )
    if beginning.startswith(_UTF_16_MARKS):
        raise InvalidInputError(f"{path} is UTF-16; convert it to UTF-8")
    if beginning.startswith(_PARQUET_MAGIC):
        return FileType(format="parquet")
    compression = [suffix for magic, suffix in _MAGIC.items() if beginning.startswith(magic)]
    return FileType(format=named.format, compression=compression[0] if compression else "")


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe or a device, which can be read or written only once."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def is_stdout(path: Path) -> bool:
    """Whether a path is where the standard output goes, such as /dev/stdout."""
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


def optional_module(name: str, purpose: str, extra: str = "score") -> ModuleType:
    """Import a module of an extra.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{purpose} needs {package}: pip install {package}, or {how_to_install(extra)}"
        ) from error


def release_arrow_memory() -> None:
    """Return what Arrow has freed to the system: its allocator keeps most of it."""
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is not None:
        pyarrow.default_memory_pool().release_unused()


@contextmanager
def opened(path: Path, compression: str) -> Iterator[tuple[BinaryIO, io.BufferedReader]]:
    """Open a file to read; returns the file itself, for its position, and its content.

    Raises:
        InvalidInputError: within the block, the file turns out to be damaged or incomplete.
        OSError: the file cannot be read.
    """
    errors: tuple[type[Exception], ...] = _COMPRESSION_ERRORS
    with path.open("rb") as raw:
        if compression == ".zst":
            errors = (*errors, _zstandard().ZstdError)
        try:
            yield raw, _decompressed(raw, compression)
        except errors as error:
            raise InvalidInputError(f"{path} is damaged or incomplete: {error}") from error
        except OSError as error:
            # bz2 has no error of its own, but one without a number.
            if compression != ".bz2" or error.errno is not None:
                raise
            raise InvalidInputError(f"{path} is damaged or incomplete: {error}") from error


def _decompressed(raw: io.BufferedReader, compression: str) -> io.BufferedReader:
    if compression == ".gz":
        return io.BufferedReader(cast("Any", gzip.GzipFile(fileobj=raw)))
    if compression == ".bz2":
        return io.BufferedReader(cast("Any", bz2.BZ2File(raw)))
    if compression == ".xz":
        return io.BufferedReader(cast("Any", lzma.LZMAFile(raw)))
    if compression == ".zst":
        reader = _zstandard().ZstdDecompressor(max_window_size=1 << 31)
        return io.BufferedReader(_CompleteFrames(raw, reader.decompressobj))
    return raw


class _CompleteFrames(io.RawIOBase):
    """The content of Zstandard frames, of which none may be cut: zstandard's reader is silent."""

    def __init__(self, raw: BinaryIO, new_frame: Any) -> None:
        self._raw, self._new_frame = raw, new_frame
        self._frame: Any = None
        self._left = memoryview(b"")
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            self._input = self._input or self._raw.read(_ZSTD_READ_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            self._frame = self._frame or self._new_frame()
            self._left = memoryview(self._frame.decompress(self._input))
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def compressor(raw: BinaryIO, compression: str) -> BinaryIO:
    """Return a stream that compresses into `raw`; closing it leaves `raw` open.

    The same content always has the same bytes, and several after another are one file.
    """
    if compression == ".gz":
        stream: Any = gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0, compresslevel=6)
    elif compression == ".bz2":
        stream = bz2.BZ2File(raw, "wb")
    elif compression == ".xz":
        stream = lzma.LZMAFile(raw, "wb")  # noqa: SIM115  # the caller closes it
    elif compression == ".zst":
        stream = _zstandard().ZstdCompressor().stream_writer(raw, closefd=False)
    else:
        return raw
    return cast("BinaryIO", stream)


def _zstandard() -> ModuleType:
    return optional_module("zstandard", "a file that ends in .zst")


def bounded_lines(stream: io.BufferedReader) -> Iterator[bytes | None]:
    """Yield the lines; None for one of more than `MAX_LINE_BYTES`, which is passed over."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        yield None
