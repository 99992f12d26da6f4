"""Tokenise a corpus once, for all runs that train on it.

Writes parts of at most 60 MiB and `shards.json` into the output folder (their format is in
training/data/shards.py). The same command resumes a preparation that was stopped; a complete
corpus is left unchanged. The files are identical to the byte, whatever the number of workers and
of interruptions.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from albert_serve.files import sha256_of
from albert_serve.progress import progress_bar
from albert_serve.settings import num_usable_cpus
from albert_serve.tokenizer import AlbertTokenizer
from training.data.corpus import CorpusError, Place, find_files, read_from
from training.data.shard_writer import ShardWriter, claim
from training.data.shards import SHARDS_FILE, Manifest, Part, ShardError, Shards
from training.data.tokenization import Tokenised, tokenise
from training.errors import report_errors
from training.system.command_line import make_parser

# A preparation is resumed after its last complete part.
PART_BYTES: Final = 60 << 20
_ARRAY_HEADER_BYTES: Final = 128
_BOUND_BYTES: Final = 8
_FINGERPRINT_BYTES: Final = 1 << 20
_INTERRUPTED: Final = 130

_EXAMPLES: Final = r"""examples:
  python -m training.prepare --corpus wiki/*.jsonl.xz --tokenizer vocab/ --output shards/
  python -m training.prepare --corpus books/ web.parquet --tokenizer vocab/ --output shards/ \
      --workers 16
"""


def prepare(
    paths: Sequence[Path],
    tokenizer_file: Path,
    folder: Path,
    *,
    num_workers: int = 1,
    part_bytes: int = PART_BYTES,
) -> Shards:
    """Tokenise a corpus into `folder`, or open the result of an earlier call with the same input.

    The input is the same if files of the same names, sizes, first and last MiB come in the same
    order, in any location, with the same `tokenizer.json`. An interrupted call is resumed. Another
    corpus in the folder is replaced; other files in it are kept.

    Args:
        paths: text, JSONL and Parquet files, plain or compressed, or folders of them.
        tokenizer_file: an ALBERT's `tokenizer.json`.
        folder: output folder.
        num_workers: worker processes; with 1 the work is done in this process. Workers import the
            program's main module, which needs `if __name__ == "__main__"`.
        part_bytes: maximum size of a part's files; exceeded only by a single document.

    Raises:
        CorpusError: a file cannot be read.
        ShardError: the corpus has no sentence, a worker died, or the folder cannot be written,
            is being prepared by another process, or has files but no tokenised corpus.
        AlbertServeError: the tokenizer is not an ALBERT's.
    """
    return _prepare(paths, tokenizer_file, folder, num_workers, part_bytes)[0]


def _prepare(
    paths: Sequence[Path], tokenizer_file: Path, folder: Path, num_workers: int, part_bytes: int
) -> tuple[Shards, int]:
    """Prepare the corpus, and return it with the number of newly written tokens."""
    files = find_files(paths)
    vocab_size = AlbertTokenizer.from_file(tokenizer_file).vocab_size
    tokenizer_sha256 = sha256_of(tokenizer_file)
    fingerprint = _fingerprint(files, tokenizer_sha256, part_bytes)
    if _is_whole(folder, fingerprint):
        return Shards.open(folder), 0
    with claim(folder):
        writer = ShardWriter(folder, tokenizer_sha256=tokenizer_sha256, fingerprint=fingerprint)
        known = writer.manifest
        done = _end(known)
        chunks = tokenise(read_from(files, done), tokenizer_file, num_workers=num_workers)
        with closing(chunks), closing(_watched(chunks, files, done)) as documents:
            _fill(writer, _PartBuilder(part_bytes, _dtype(vocab_size)), documents)
    return Shards.open(folder), writer.manifest.num_tokens - known.num_tokens


def _fill(writer: ShardWriter, builder: _PartBuilder, documents: Iterable[Tokenised]) -> None:
    for document in documents:
        if not builder.has_room_for(document):
            writer.add(*builder.take())
        builder.add(document)
    if builder.num_documents:
        writer.add(*builder.take())
    if not writer.manifest.parts:
        raise ShardError("the corpus holds no sentence")
    writer.complete()


class _PartBuilder:
    """Gathers documents up to a part's size; parts depend on the documents alone."""

    def __init__(self, part_bytes: int, dtype: DTypeLike) -> None:
        self._part_bytes = part_bytes
        self._dtype = np.dtype(dtype)
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[NDArray[np.generic]] = []
        self._lengths: list[NDArray[np.int32]] = []
        self._end = Place()
        # Each array has a header, and each of the two bounds one additional entry.
        self._num_bytes = 3 * _ARRAY_HEADER_BYTES + 2 * _BOUND_BYTES

    @property
    def num_documents(self) -> int:
        return len(self._tokens)

    def has_room_for(self, document: Tokenised) -> bool:
        room = self._part_bytes - self._num_bytes
        return not self._tokens or self._size(document) <= room

    def add(self, document: Tokenised) -> None:
        if len(document.lengths):
            self._tokens.append(document.tokens.astype(self._dtype))
            self._lengths.append(document.lengths)
            self._end = document.end
            self._num_bytes += self._size(document)

    def take(self) -> tuple[Part, tuple[int, int, int]]:
        """Return the part and the position right after it, and begin the next part."""
        part = Part(
            tokens=np.concatenate(self._tokens),
            sentences=_bounds(np.concatenate(self._lengths)),
            documents=_bounds([len(lengths) for lengths in self._lengths]),
        )
        end = (self._end.num_files, self._end.num_documents, self._end.num_bytes)
        self._clear()
        return part, end

    def _size(self, document: Tokenised) -> int:
        num_bounds = len(document.lengths) + 1
        return len(document.tokens) * self._dtype.itemsize + num_bounds * _BOUND_BYTES


def _watched(
    chunks: Iterable[list[Tokenised]], files: Sequence[Path], done: Place
) -> Generator[Tokenised]:
    """Yield the documents one by one, and show the bytes of the files that they are from."""
    with progress_bar(
        title="tokenising",
        total=sum(file.stat().st_size for file in files),
        initial=done.num_bytes,
        unit="B",
        unit_scale=True,
    ) as bar:
        for chunk in chunks:
            yield from chunk
            bar.update(chunk[-1].end.num_bytes - bar.n)


def _bounds(lengths: NDArray[np.int32] | list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _dtype(vocab_size: int) -> DTypeLike:
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def _end(manifest: Manifest) -> Place:
    """Return the position in the corpus right after the last part."""
    if not manifest.parts:
        return Place()
    num_files, num_documents, num_bytes = manifest.parts[-1].end
    return Place(num_files=num_files, num_documents=num_documents, num_bytes=num_bytes)


def _is_whole(folder: Path, fingerprint: str) -> bool:
    """Whether the folder has this corpus, completely tokenised."""
    try:
        return Manifest.read(folder / SHARDS_FILE).fingerprint == fingerprint
    except ShardError:
        return False


def _fingerprint(files: Sequence[Path], tokenizer_sha256: str, part_bytes: int) -> str:
    """Hash the tokenizer, and names, sizes and ends of the files, without reading all of them."""
    digest = hashlib.sha256(f"{tokenizer_sha256} {part_bytes}\n".encode())
    for file in files:
        try:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                ends = hashlib.sha256(stream.read(_FINGERPRINT_BYTES))
                stream.seek(max(0, size - _FINGERPRINT_BYTES))
                ends.update(stream.read(_FINGERPRINT_BYTES))
        except OSError as error:
            raise CorpusError(f"{file} cannot be read: {error.strerror}") from error
        digest.update(f"{file.name}:{size}:{ends.hexdigest()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _PrepareConfig:
    """Options of the command.

    Attributes:
        tokenizer: folder that `training.vocab` wrote.
        output: folder to write into.
    """

    corpus: Sequence[Path]
    tokenizer: Path
    output: Path
    workers: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    config = _parse(arguments)
    return report_errors(lambda: _run(config))


def _run(config: _PrepareConfig) -> int:
    started = time.monotonic()
    tokenizer_file = config.tokenizer / "tokenizer.json"
    try:
        shards, num_new_tokens = _prepare(
            config.corpus, tokenizer_file, config.output, config.workers, PART_BYTES
        )
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes it", file=sys.stderr)
        return _INTERRUPTED
    rate = num_new_tokens / (time.monotonic() - started)
    num_bytes = sum(part.num_bytes for part in shards.parts)
    print(
        f"{config.output}: {shards.num_documents:,} documents, "
        f"{shards.num_sentences:,} sentences, {shards.num_tokens:,} tokens; "
        f"parts: {len(shards.parts):,}, {num_bytes:,} bytes; "
        + (f"{rate:,.0f} tokens/s" if num_new_tokens else "it was there already")
    )
    return 0


def _parse(arguments: Sequence[str] | None) -> _PrepareConfig:
    parser = make_parser("training.prepare", __doc__, _EXAMPLES)
    add = parser.add_argument
    add(
        "--corpus",
        nargs="+",
        type=Path,
        required=True,
        help="Parquet files, or text or JSONL files, plain, .gz, .xz, .bz2 or .zst, or folders",
    )
    add("--tokenizer", type=Path, required=True, help="folder that training.vocab wrote")
    add("--output", type=Path, required=True, help="folder to write into")
    add(
        "--workers",
        type=_parse_workers,
        default=num_usable_cpus(),
        help="worker processes (%(default)s, the number of usable CPUs)",
    )
    return _PrepareConfig(**vars(parser.parse_args(arguments)))


def _parse_workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
