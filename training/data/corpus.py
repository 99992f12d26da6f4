"""Documents from files of text, JSON, CSV, Parquet and Arrow, and their sentences.

Files are streamed, so that memory is bounded whatever their size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import sentencex

from albert_serve.errors import AlbertServeError
from albert_serve.tables.columnar import is_dataset_metadata
from albert_serve.tables.formats import type_by_name
from training.data import documents
from training.data.documents import MAX_DOCUMENT_CHARACTERS
from training.errors import TrainingError

TEXT_COLUMN_HELP: Final = (
    "column or JSON field of the text (default: text, sentence, or the only column)"
)
_WHITESPACE: Final = re.compile(r"\s+")


class CorpusError(TrainingError):
    """A corpus file that cannot be read; the message names the file and the line."""


class CorpusPosition(NamedTuple):
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
    end: CorpusPosition


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the given files and those in the given folders, each once and in a stable order.

    Hidden files and folders within folders are skipped, and what `datasets` saves beside its data.
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


def read_documents(files: Sequence[Path], text_column: str | None = None) -> Iterator[str]:
    """Yield each document: a record's `text`, or the text between blank lines.

    Names tell formats: `.jsonl` and `.json` (lines, or an array), `.csv`, `.tsv`, `.parquet`,
    `.arrow`. Under other names what begins as JSON or as WikiExtractor's `<doc ...>` is read as
    such, and else as text. A document over 4 Mi characters is split, at line ends where it has any.

    Args:
        text_column: the field of JSON or column of a table that holds the documents; None for a
            usual name, or the only one of texts.
    """
    return (document.text for document in read_from(files, CorpusPosition(), text_column))


def read_from(
    files: Sequence[Path], start: CorpusPosition, text_column: str | None = None
) -> Iterator[Document]:
    """Yield the documents of `read_documents` after `start`, each with its position.

    Whole files before `start` are not opened; earlier documents of its own file are read and
    skipped.
    """
    num_bytes = sum(_size(file) for file in files[: start.num_files])
    num_skipped = start.num_documents
    for index in range(start.num_files, len(files)):
        documents = enumerate(_read_file(files[index], text_column), start=1)
        for number, (text, position) in islice(documents, num_skipped, None):
            place = CorpusPosition(
                num_files=index, num_documents=number, num_bytes=num_bytes + position
            )
            yield Document(text=text, end=place)
        num_skipped = 0
        num_bytes += _size(files[index])


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file, decompressed according to its suffix."""
    with _corpus_errors():
        for line, _ in documents.read_lines(file, type_by_name(file.name)):
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
    return file.is_file() and not is_hidden and not is_dataset_metadata(file)


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


def _read_file(file: Path, text_column: str | None) -> Iterator[tuple[str, int]]:
    """Yield documents, each with the number of bytes of the file read so far."""
    with _corpus_errors():
        for text, position in documents.read_file(file, text_column):
            for piece in _cut(text):
                yield piece, position


def _cut(text: str) -> Iterator[str]:
    """Split a text into pieces of bounded length, at line ends where it has any."""
    while len(text) > MAX_DOCUMENT_CHARACTERS:
        end = text.rfind("\n", 0, MAX_DOCUMENT_CHARACTERS) + 1 or MAX_DOCUMENT_CHARACTERS
        if piece := text[:end].strip():
            yield piece
        text = text[end:]
    if text.strip():
        yield text
