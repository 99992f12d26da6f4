"""Documents from text, JSONL and Parquet files, plain or compressed, and their sentences.

Files are streamed, so that memory is bounded whatever their size.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import sentencex

from training.errors import TrainingError

# Drops the byte order mark that some editors put before UTF-8.
_ENCODING: Final = "utf-8-sig"
_DAMAGE: Final = (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError, zlib.error)
_CHUNK_BYTES: Final = 1 << 16
# Otherwise a file without line ends, such as one of zeros, would be read into memory whole.
MAX_LINE_CHARACTERS: Final = 1 << 26
_MAX_DOCUMENT_CHARACTERS: Final = 1 << 22
_ROWS_A_BATCH: Final = 256
_WHITESPACE: Final = re.compile(r"\s+")


class CorpusError(TrainingError):
    """A corpus file that cannot be read; the message names the file and the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A position between two documents of a list of files.

    Attributes:
        num_files: whole files before it.
        num_documents: documents of the next file before it.
        num_bytes: approximate number of bytes on disk before it.
    """

    num_files: int = 0
    num_documents: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A document's text, and the position right after it."""

    text: str
    end: Place


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the given files and those in the given folders, each once and in a stable order.

    Hidden files and folders within folders are skipped.

    Raises:
        CorpusError: a path does not exist, or there is no file at all.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if _is_visible_file(file, path))
        elif path.is_file():
            files.append(path)
        elif path.exists():
            raise CorpusError(f"{path} is neither a file nor a folder")
        else:
            raise CorpusError(f"{path} does not exist")
    if not files:
        raise CorpusError(f"no file in {', '.join(map(str, paths))}")
    return list(dict.fromkeys(files))


def read_documents(files: Sequence[Path]) -> Iterator[str]:
    """Yield the text of each document: a record's `text`, or the text between blank lines.

    A file is JSONL if its name ends in `.jsonl`, or in that and `.gz`, `.xz`, `.bz2` or `.zst`;
    Parquet if it ends in `.parquet`; else text. A document over 4 Mi characters is split, at line
    ends where it has any.

    Raises:
        CorpusError: a line is not JSON, a record has no text, or a file is damaged.
    """
    return (document.text for document in read_from(files, Place()))


def read_from(files: Sequence[Path], start: Place) -> Iterator[Document]:
    """Yield the documents of `read_documents` after `start`, each with its position.

    Whole files before `start` are not opened; earlier documents of its own file are read and
    skipped.

    Raises:
        CorpusError: as `read_documents`.
    """
    num_bytes = sum(_size(file) for file in files[: start.num_files])
    num_skipped = start.num_documents
    for index in range(start.num_files, len(files)):
        documents = enumerate(_read_file(files[index]), start=1)
        for number, (text, position) in islice(documents, num_skipped, None):
            place = Place(num_files=index, num_documents=number, num_bytes=num_bytes + position)
            yield Document(text=text, end=place)
        num_skipped = 0
        num_bytes += _size(files[index])


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file, decompressed according to its suffix.

    Raises:
        CorpusError: the file cannot be read, is damaged, or is not UTF-8.
    """
    for line, _ in _read_lines(file):
        yield line


def split_sentences(document: str) -> list[str]:
    """Split a document into sentences; a paragraph's end always ends a sentence."""
    sentences: list[str] = []
    for paragraph in document.split("\n"):
        if paragraph.strip():
            for sentence in sentencex.segment("en", paragraph):
                collapsed = _WHITESPACE.sub(" ", sentence).strip()
                if collapsed:
                    sentences.append(collapsed)
    return sentences


def _is_visible_file(file: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not is_hidden


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise CorpusError(f"{file} cannot be read: {error.strerror}") from error


def _read_file(file: Path) -> Iterator[tuple[str, int]]:
    """Yield documents, each with the number of bytes of the file read so far."""
    if file.suffix == ".parquet":
        documents = _read_parquet(file)
    elif ".jsonl" in file.suffixes:
        documents = _read_jsonl(file)
    else:
        documents = _read_text(file)
    for text, position in documents:
        for piece in _cut(text):
            yield piece, position


def _cut(text: str) -> Iterator[str]:
    """Split a text into pieces of bounded length, at line ends where it has any."""
    while len(text) > _MAX_DOCUMENT_CHARACTERS:
        end = text.rfind("\n", 0, _MAX_DOCUMENT_CHARACTERS) + 1 or _MAX_DOCUMENT_CHARACTERS
        if piece := text[:end].strip():
            yield piece
        text = text[end:]
    if text.strip():
        yield text


def _read_lines(file: Path) -> Iterator[tuple[str, int]]:
    """Yield lines, each with the number of bytes of the file read so far."""
    open_content = _OPENERS.get(file.suffix, _open_plain)
    try:
        with (
            file.open("rb") as raw,
            io.TextIOWrapper(open_content(raw), encoding=_ENCODING) as stream,
        ):
            lines = iter(partial(stream.readline, MAX_LINE_CHARACTERS), "")
            for number, line in enumerate(lines, start=1):
                if len(line) == MAX_LINE_CHARACTERS and not line.endswith("\n"):
                    raise CorpusError(
                        f"{file}, line {number}: longer than {MAX_LINE_CHARACTERS:,} characters; "
                        "is the file text?"
                    )
                yield line, raw.tell()
    except _DAMAGE as error:
        raise CorpusError(f"{file}: {error}; is the file complete and UTF-8?") from error


def _open_plain(raw: IO[bytes]) -> IO[bytes]:
    return raw


def _open_zstd(raw: IO[bytes]) -> Any:
    return pa.CompressedInputStream(raw, "zstd")


_OPENERS: Final[dict[str, Callable[..., Any]]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _open_zstd,
}


def _read_jsonl(file: Path) -> Iterator[tuple[str, int]]:
    for number, (line, position) in enumerate(_read_lines(file), start=1):
        if line.strip():
            yield _parse_record(line, f"{file}, line {number}"), position


def _parse_record(line: str, place: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{place}: not JSON: {error}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise CorpusError(f'{place}: no "text" field that is a string')
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CorpusError(f"{place}: half of a surrogate pair in the text: {error}") from error
    return text


def _read_text(file: Path) -> Iterator[tuple[str, int]]:
    paragraph: list[str] = []
    size = position = 0
    for line, position in _read_lines(file):
        if line.strip() and size < _MAX_DOCUMENT_CHARACTERS:
            paragraph.append(line)
            size += len(line)
        elif paragraph:
            yield "".join(paragraph), position
            paragraph = [line] if line.strip() else []
            size = sum(map(len, paragraph))
    if paragraph:
        yield "".join(paragraph), position


def _read_parquet(file: Path) -> Iterator[tuple[str, int]]:
    try:
        # With a buffer, a row group is read page by page.
        with pq.ParquetFile(file, buffer_size=_CHUNK_BYTES, pre_buffer=False) as table:
            names = table.schema_arrow.names
            if "text" not in names:
                raise CorpusError(f'{file}: no column "text", only {", ".join(names) or "none"}')
            size, num_rows = _size(file), table.metadata.num_rows
            for number, text in enumerate(_text_column(table), start=1):
                if not isinstance(text, str):
                    raise CorpusError(f"{file}, row {number}: the text is {text!r}, not a string")
                yield text, size * number // num_rows
    except (*_DAMAGE, pa.ArrowException) as error:
        raise CorpusError(f"{file}: {error}; is the file complete, and Parquet?") from error


def _text_column(table: pq.ParquetFile) -> Iterator[Any]:
    for batch in table.iter_batches(_ROWS_A_BATCH, columns=["text"], use_threads=False):
        yield from batch.column(0).to_pylist()
