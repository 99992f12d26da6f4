"""Files into pieces and back, a block at a time, each with its hash."""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.bare_machine.manifest import BareMachineError, Codec, FileRecord, Group, Piece

PIECE_BYTES: Final = 15 << 20
_PIECE: Final = re.compile(r"\d{3,}-([0-9a-f]{12})\.piece")
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A group before it is cut.

    Attributes:
        files: by their path in the parcel.
    """

    name: str
    codec: Codec
    files: Mapping[str, Path]


def cut(
    sources: Sequence[Source], folder: Path, *, piece_bytes: int, wanted: Container[int]
) -> tuple[Group, ...]:
    """Write the files of the groups as pieces.

    All is read and hashed; of the pieces only those whose numbers are wanted are written.

    Args:
        folder: where the pieces go; it is made if need be.
        piece_bytes: the most that a piece has.

    Raises:
        OSError: a file cannot be read, or a piece not be written; it names the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _Cutter(folder, piece_bytes, wanted) as cutter:
        return tuple(cutter.cut(source) for source in sources)


class _Cutter:
    """Cuts streams of bytes."""

    def __init__(self, folder: Path, piece_bytes: int, wanted: Container[int]) -> None:
        self._partial = folder / "piece.partial"
        self._piece_bytes = piece_bytes
        self._wanted = wanted
        self._number = 0
        self._partial.unlink(missing_ok=True)
        self._begin()

    def __enter__(self) -> _Cutter:
        return self

    def __exit__(self, *error: object) -> None:
        self._partial.unlink(missing_ok=True)

    def cut(self, source: Source) -> Group:
        records: list[FileRecord] = []
        pieces: list[Piece] = []
        for block in _encoded(_read(source.files, records), source.codec):
            rest = memoryview(block)
            while rest:
                room = self._piece_bytes - self._num_bytes
                self._put(rest[:room])
                rest = rest[room:]
                if self._num_bytes == self._piece_bytes:
                    pieces.append(self._end())
        if self._num_bytes:
            pieces.append(self._end())
        return Group(
            name=source.name, codec=source.codec, files=tuple(records), pieces=tuple(pieces)
        )

    def _begin(self) -> None:
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def _put(self, part: memoryview) -> None:
        if self._number in self._wanted:
            with naming(self._partial), self._partial.open("ab") as stream:
                stream.write(part)
        self._hash.update(part)
        self._num_bytes += len(part)

    def _end(self) -> Piece:
        piece = Piece(number=self._number, num_bytes=self._num_bytes, sha256=self._hash.hexdigest())
        if self._number in self._wanted:
            os.replace(self._partial, self._partial.with_name(piece.name))
        self._number += 1
        self._begin()
        return piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Pieces in folders.

    Attributes:
        whole: files whose content is what their name says, by sha256.
        damaged: the other ones.
    """

    whole: Mapping[str, Path]
    damaged: tuple[Path, ...]


def find_pieces(files: Iterable[Path]) -> Found:
    """Hash those of the files that are named as a piece is.

    Raises:
        OSError: one cannot be read.
    """
    whole: dict[str, Path] = {}
    damaged: list[Path] = []
    for file in files:
        name = _PIECE.fullmatch(file.name)
        if name is None:
            continue
        sha256 = hash_file(file)
        if sha256.startswith(name[1]):
            whole[sha256] = file
        else:
            damaged.append(file)
    return Found(whole=whole, damaged=tuple(damaged))


def assemble(group: Group, pieces: Mapping[str, Path], folder: Path) -> None:
    """Put the files of a group together again, each whole or not at all.

    Files that are there already, as they should be, stay as they are.

    Args:
        pieces: their files by sha256, all that the group has.
        folder: what the paths of the group's files are below.

    Raises:
        BareMachineError: a file is not what the manifest says.
        OSError: a file cannot be read or written; it names the file.
    """
    if all(holds(folder / record.path, record) for record in group.files):
        return
    stream = _Stream(_decoded(_read_pieces(group.pieces, pieces), group.codec))
    for record in group.files:
        _write(folder / record.path, record, stream)


def holds(file: Path, record: FileRecord) -> bool:
    """Whether the file is there, with the content that is recorded."""
    try:
        return file.stat().st_size == record.num_bytes and hash_file(file) == record.sha256
    except OSError:
        return False


def hash_file(file: Path) -> str:
    """The sha256 of a file's content, as hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Errors of the system that name no file, as that of a full disk does not, name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(file)) from error


class _Stream:
    """Bytes that come in blocks, taken in other portions."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = (memoryview(block) for block in blocks if block)
        self._left = memoryview(b"")

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """The next bytes; fewer where the stream ends."""
        while num_bytes > 0:
            self._left = self._left or next(self._blocks, self._left)
            if not self._left:
                return
            part = self._left[:num_bytes]
            self._left = self._left[len(part) :]
            num_bytes -= len(part)
            yield part


def _write(file: Path, record: FileRecord, stream: _Stream) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    digest = hashlib.sha256()
    try:
        with naming(partial), partial.open("wb") as target:
            for part in stream.take(record.num_bytes):
                digest.update(part)
                target.write(part)
        if digest.hexdigest() != record.sha256:
            raise BareMachineError(f"{file} is not what the manifest says; transfer it again")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _read(files: Mapping[str, Path], records: list[FileRecord]) -> Iterator[bytes]:
    """The content of the files, one after the other; each is recorded when it is read."""
    for path, file in files.items():
        digest, num_bytes = hashlib.sha256(), 0
        for block in _blocks(file):
            digest.update(block)
            num_bytes += len(block)
            yield block
        records.append(FileRecord(path=path, num_bytes=num_bytes, sha256=digest.hexdigest()))


def _read_pieces(pieces: Iterable[Piece], files: Mapping[str, Path]) -> Iterator[bytes]:
    for piece in pieces:
        yield from _blocks(files[piece.sha256])


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block


def _encoded(blocks: Iterator[bytes], codec: Codec) -> Iterator[bytes]:
    if codec == "stored":
        yield from blocks
        return
    compressor = zlib.compressobj()
    for block in blocks:
        yield compressor.compress(block)
    yield compressor.flush()


def _decoded(blocks: Iterator[bytes], codec: Codec) -> Iterator[bytes]:
    """The inverse of `_encoded`; it ends early where the stream is damaged."""
    if codec == "stored":
        yield from blocks
        return
    decompressor = zlib.decompressobj()
    with suppress(zlib.error):
        for rest in blocks:
            while rest:
                yield decompressor.decompress(rest, _BLOCK_BYTES)
                rest = decompressor.unconsumed_tail
        yield decompressor.flush()
