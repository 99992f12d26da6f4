"""Documents from text and JSONL files, plain or compressed, and their sentences."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TextIO

import sentencex
import zstandard

from training.errors import TrainingError

# Takes the mark that some editors put before UTF-8.
_ENCODING: Final = "utf-8-sig"
_OPENERS: Final[dict[str, Callable[..., TextIO]]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
_DAMAGE: Final = (
    UnicodeDecodeError,
    EOFError,
    OSError,
    lzma.LZMAError,
    zlib.error,
    zstandard.ZstdError,
)
# What `zstd --ultra --long=31` asks for; zstandard refuses more than 128 MiB unless told.
_ZSTD_MAX_WINDOW_BYTES: Final = 1 << 31
_CHUNK_BYTES: Final = 1 << 16
_WHITESPACE: Final = re.compile(r"\s+")


class CorpusError(TrainingError):
    """A corpus file that cannot be read; the message names the file and the line."""


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those in the folders named, each once and in a stable order.

    Hidden files in folders are passed over.

    Raises:
        CorpusError: a path does not exist, or there is no file at all.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if _is_visible_file(file))
        elif path.is_file():
            files.append(path)
        else:
            raise CorpusError(f"{path} does not exist")
    if not files:
        raise CorpusError(f"no file in {', '.join(map(str, paths))}")
    return list(dict.fromkeys(files))


def read_documents(files: Iterable[Path]) -> Iterator[str]:
    """The text of each document: a JSONL record's `text`, or what stands between blank lines.

    A file is JSONL when its name ends in `.jsonl`, or in that and `.gz`, `.xz`, `.bz2` or `.zst`.

    Raises:
        CorpusError: a line is not JSON, a record has no text, or a file is damaged.
    """
    for file in files:
        lines = read_lines(file)
        yield from _read_jsonl(file, lines) if ".jsonl" in file.suffixes else _read_text(lines)


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a text file, decompressed where its name says that it is compressed.

    Raises:
        CorpusError: the file cannot be read, is damaged, or is not UTF-8.
    """
    try:
        yield from _decompressed_lines(file)
    except _DAMAGE as error:
        raise CorpusError(f"{file}: {error}; is the file complete and UTF-8?") from error


def split_sentences(document: str) -> list[str]:
    """The sentences of a document; a paragraph's end always ends a sentence."""
    sentences: list[str] = []
    for paragraph in document.split("\n"):
        if paragraph.strip():
            for sentence in sentencex.segment("en", paragraph):
                collapsed = _WHITESPACE.sub(" ", sentence).strip()
                if collapsed:
                    sentences.append(collapsed)
    return sentences


def _is_visible_file(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".")


def _decompressed_lines(file: Path) -> Iterator[str]:
    if file.suffix == ".zst":
        yield from _split_lines(codecs.iterdecode(_read_zstd(file), _ENCODING))
        return
    with _OPENERS.get(file.suffix, open)(file, "rt", encoding=_ENCODING) as lines:
        yield from lines


def _read_zstd(file: Path) -> Iterator[bytes]:
    """The content of all frames; zstandard's own reader would take a file cut short for whole."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW_BYTES)
    frame: zstandard.ZstdDecompressionObj | None = None
    with file.open("rb") as compressed:
        while chunk := compressed.read(_CHUNK_BYTES):
            while chunk:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data
                if frame.eof:
                    frame = None
    if frame is not None:
        raise EOFError("the file ends within a zstd frame")


def _split_lines(pieces: Iterable[str]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from (line + "\n" for line in lines)
    if rest:
        yield rest


def _read_jsonl(file: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise CorpusError(f"{file}, line {number}: not JSON: {error}") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise CorpusError(f'{file}, line {number}: no "text" field that is a string')
        if text.strip():
            yield text


def _read_text(lines: Iterable[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph)
            paragraph = []
    if paragraph:
        yield "".join(paragraph)
