"""Preparation of a corpus, whose documents are tokenised into shards once for all runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import lock_descriptor

from albert_serve.files import sha256_of
from albert_serve.progress import progress_bar
from albert_serve.tokenizer import AlbertTokenizer
from training.data.corpus import CorpusError, CorpusPosition, find_files, read_from
from training.data.shard_writer import ShardWriter, check_same_corpus
from training.data.shards import SHARDS_FILE, CorpusManifest, ShardError, Shards
from training.data.tokenization import Tokenised, tokenise

# Default maximum size of a part. An interrupted preparation resumes after its last complete part.
PART_BYTES: Final = 60 << 20
_FINGERPRINT_BYTES: Final = 1 << 20


def prepare(
    paths: Sequence[Path],
    tokenizer_file: Path,
    folder: Path,
    *,
    text_column: str | None = None,
    num_workers: int = 1,
    part_bytes: int = PART_BYTES,
) -> Shards:
    """Tokenise a corpus into `folder`, or open the result of an earlier call with the same input.

    The input is the same if `tokenizer.json`, the options, and the files' order, names, sizes, and
    first and last MiB are the same. The files' folders may differ. An interrupted call is resumed.

    Args:
        text_column: JSON field or column that contains the documents, or None to detect it.
        num_workers: number of worker processes. 1 means that this process does the work. Workers
            import the program's main module, which needs `if __name__ == "__main__"`.
        part_bytes: maximum size of a part's files, unless a single document exceeds it.
    """
    files = find_files(paths)
    tokenizer = AlbertTokenizer.from_file(tokenizer_file)
    tokenizer_sha256 = sha256_of(tokenizer_file)
    fingerprint = _fingerprint(files, tokenizer_sha256, part_bytes, text_column)
    if (folder / SHARDS_FILE).is_file():
        check_same_corpus(folder, CorpusManifest.read(folder / SHARDS_FILE), fingerprint)
        return Shards.open(folder)
    with _locked(folder):
        manifest = CorpusManifest(
            tokenizer_sha256=tokenizer_sha256,
            fingerprint=fingerprint,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
        )
        writer = ShardWriter(
            folder, manifest, part_bytes=part_bytes, vocab_size=tokenizer.vocab_size
        )
        documents = read_from(files, writer.end, text_column)
        chunks = tokenise(documents, tokenizer_file, num_workers=num_workers)
        with closing(chunks), closing(_with_progress(chunks, files, writer.end)) as tokenised:
            writer.write(tokenised)
    return Shards.open(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create a folder, and lock it against other processes during a `with` block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Locking the folder itself avoids a lock file in it.
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ShardError(f"{folder} cannot be written: {error.strerror}.") from error
    try:
        is_locked = True
        with suppress(OSError):  # Some file systems have no locks.
            is_locked = lock_descriptor(descriptor, blocking=False)
        if not is_locked:
            raise ShardError(f"Another process is preparing {folder}. Wait until it ends.")
        yield
    finally:
        os.close(descriptor)


def _with_progress(
    chunks: Iterable[list[Tokenised]], files: Sequence[Path], start: CorpusPosition
) -> Generator[Tokenised]:
    """Yield each document, and show the number of bytes read so far."""
    with progress_bar(
        title="tokenising",
        total=sum(file.stat().st_size for file in files),
        initial=start.num_bytes,
        unit="B",
        unit_scale=True,
    ) as bar:
        for chunk in chunks:
            yield from chunk
            bar.update(chunk[-1].end.num_bytes - bar.n)


def _fingerprint(
    files: Sequence[Path], tokenizer_sha256: str, part_bytes: int, text_column: str | None
) -> str:
    """Return a hash of the options, the tokenizer, and the files' names, sizes, begins and ends."""
    column = "" if text_column is None else f"{text_column}\n"
    digest = hashlib.sha256(f"{tokenizer_sha256} {part_bytes}\n{column}".encode())
    for file in files:
        try:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                ends = hashlib.sha256(stream.read(_FINGERPRINT_BYTES))
                stream.seek(max(0, size - _FINGERPRINT_BYTES))
                ends.update(stream.read(_FINGERPRINT_BYTES))
        except OSError as error:
            raise CorpusError(f"{file} cannot be read: {error.strerror}.") from error
        digest.update(f"{file.name}:{size}:{ends.hexdigest()}\n".encode())
    return digest.hexdigest()
