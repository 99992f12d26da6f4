"""Documents from files of text, JSON, CSV, Parquet and Arrow, and their sentences.

Files are streamed, so memory is bounded for files of any size.
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
    """A corpus file that cannot be read. The message gives the file and the line."""


class CorpusPosition(NamedTuple):
    """A position between two documents of a list of files.

    Attributes:
        num_files: number of complete files before the position.
        num_documents: number of documents before the position in the next file.
        num_bytes: approximate number of bytes on disk before the position.
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
    """Return the files in `paths` and in the folders among them, each once and in a stable order.

    Within folders, hidden files and the metadata files of `datasets` are skipped.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if _is_visible_file(file, path))
        elif path.is_file():
            files.append(path)
        elif path.exists():
            raise CorpusError(f"{path} is neither a file nor a folder.")
        else:
            raise CorpusError(f"{path} does not exist.")
    if not files:
        raise CorpusError(f"There is no file in {', '.join(map(str, paths))}.")
    return list(dict.fromkeys(files))


def read_documents(files: Sequence[Path], text_column: str | None = None) -> Iterator[str]:
    """Yield each document: a record's `text`, or the text between blank lines.

    The suffix gives the format: `.jsonl` and `.json` (lines, or an array), `.csv`, `.tsv`,
    `.parquet`, `.arrow`. Files with other suffixes are JSON, CSV or WikiExtractor's `<doc ...>` if
    they begin like one of these, otherwise text. A document of more than 4 Mi characters is split,
    at line ends if possible.

    Args:
        text_column: JSON field or column that contains the documents (default: one with a usual
            name, or the only column of texts).
    """
    return (document.text for document in read_from(files, CorpusPosition(), text_column))


def read_from(
    files: Sequence[Path], start: CorpusPosition, text_column: str | None = None
) -> Iterator[Document]:
    """Yield the documents of `read_documents` after `start`, each with its position.

    Files that end before `start` are not opened. In the file that contains `start`, earlier
    documents are read and skipped.
    """
    num_bytes = sum(_size(file) for file in files[: start.num_files])
    num_skipped = start.num_documents
    for index in range(start.num_files, len(files)):
        documents = enumerate(_read_file(files[index], text_column), start=1)
        for number, (text, position) in islice(documents, num_skipped, None):
            end = CorpusPosition(
                num_files=index, num_documents=number, num_bytes=num_bytes + position
            )
            yield Document(text=text, end=end)
        num_skipped = 0
        num_bytes += _size(files[index])


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file, decompressed according to its suffix."""
    with _corpus_errors():
        for line, _ in documents.read_lines(file, type_by_name(file.name)):
            yield line


def split_sentences(document: str) -> list[str]:
    """Split a document into sentences. The end of a paragraph always ends a sentence."""
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
    """Convert errors from reading a file in a `with` block to CorpusError."""
    try:
        yield
    except (AlbertServeError, OSError) as error:
        raise CorpusError(str(error)) from error


def _size(file: Path) -> int:
    with _corpus_errors():
        return file.stat().st_size


def _read_file(file: Path, text_column: str | None) -> Iterator[tuple[str, int]]:
    """Yield each document and the number of bytes of the file read so far."""
    with _corpus_errors():
        for text, position in documents.read_file(file, text_column):
            for piece in _split_long_text(text):
                yield piece, position


def _split_long_text(text: str) -> Iterator[str]:
    """Split a text into pieces of bounded length, at line ends if possible."""
    while len(text) > MAX_DOCUMENT_CHARACTERS:
        end = text.rfind("\n", 0, MAX_DOCUMENT_CHARACTERS) + 1 or MAX_DOCUMENT_CHARACTERS
        if piece := text[:end].strip():
            yield piece
        text = text[end:]
    if text.strip():
        yield text
