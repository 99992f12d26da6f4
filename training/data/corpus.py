"""Documents from text, JSONL and Parquet files, plain or compressed, and their sentences.

Files are streamed, so that memory is bounded whatever their size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import sentencex

from albert_serve.errors import AlbertServeError
from albert_serve.tables import (
    is_utf8,
    json_rows,
    open_lines,
    parquet_batches,
    parquet_schema,
    text_lines,
    type_by_name,
)
from training.errors import TrainingError

_MAX_DOCUMENT_CHARACTERS: Final = 1 << 22
_WHITESPACE: Final = re.compile(r"\s+")


class CorpusError(TrainingError):
    """A corpus file that cannot be read; the message names the file and the line."""


class Place(NamedTuple):
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
    for line, _ in _lines(file):
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


@contextmanager
def _corpus_errors() -> Iterator[None]:
    """Raise the errors of a file that is read as CorpusError; for `with`."""
    try:
        yield
    except (AlbertServeError, OSError) as error:
        raise CorpusError(str(error)) from error


def _size(file: Path) -> int:
    with _corpus_errors():
        return file.stat().st_size


def _read_file(file: Path) -> Iterator[tuple[str, int]]:
    """Yield documents, each with the number of bytes of the file read so far."""
    read: Callable[[Path], Iterator[tuple[str, int]]] = _read_text
    if file.suffix == ".parquet":
        read = _read_parquet
    elif ".jsonl" in file.suffixes:
        read = _read_jsonl
    for text, position in read(file):
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


def _lines(file: Path) -> Iterator[tuple[str, int]]:
    """Yield lines, each with the number of bytes of the file read so far."""
    compression = type_by_name(file.name).compression
    with _corpus_errors(), open_lines(file, compression) as (stream, position):
        for number, line in enumerate(text_lines(file, stream), start=1):
            if not is_utf8(line):
                raise CorpusError(f"{file}, line {number} is not UTF-8")
            yield line, position()


def _read_text(file: Path) -> Iterator[tuple[str, int]]:
    paragraph: list[str] = []
    size = position = 0
    for line, position in _lines(file):
        line = line.replace("\r\n", "\n")
        if line.strip() and size < _MAX_DOCUMENT_CHARACTERS:
            paragraph.append(line)
            size += len(line)
        elif paragraph:
            yield "".join(paragraph), position
            paragraph = [line] if line.strip() else []
            size = sum(map(len, paragraph))
    if paragraph:
        yield "".join(paragraph), position


def _read_jsonl(file: Path) -> Iterator[tuple[str, int]]:
    compression = type_by_name(file.name).compression
    with _corpus_errors(), open_lines(file, compression) as (stream, position):
        for number, record, error in json_rows(stream):
            if error is not None:
                raise CorpusError(f"{file}, {error}")
            yield _checked(record.get("text"), f"{file}, line {number}"), position()


def _read_parquet(file: Path) -> Iterator[tuple[str, int]]:
    with _corpus_errors():
        schema, _ = parquet_schema(file)
        if "text" not in schema.names:
            raise CorpusError(f'{file}: no column "text", only {", ".join(schema.names) or "none"}')
        size = _size(file)
        for start, share, batch in parquet_batches(file, ["text"]):
            for number, text in enumerate(batch.column(0).to_pylist(), start=start + 1):
                yield _checked(text, f"{file}, row {number}"), round(share * size)


def _checked(text: object, place: str) -> str:
    if not isinstance(text, str):
        raise CorpusError(f'{place}: "text" is {text!r}, not a string')
    if not text.isascii() and not is_utf8(text):
        raise CorpusError(f"{place}: half of a surrogate pair in the text")
    return text
