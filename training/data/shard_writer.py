"""Writer of a tokenised corpus, which resumes after the last part of an interrupted process.

A part is complete once `partial.json` lists it. After the last part, that file becomes
`shards.json`. An unlisted part is written again, with the same bytes, because parts depend only on
the documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.files import sync, write_atomically
from training.data.corpus import CorpusPosition
from training.data.shards import (
    ARRAYS,
    PARTIAL_FILE,
    SHARDS_FILE,
    CorpusManifest,
    Shard,
    ShardError,
    ShardRecord,
)
from training.data.tokenization import Tokenised

_BOUND_BYTES: Final = 8
# An empty part has the headers of three arrays, and the first entry of both arrays of bounds.
_EMPTY_BYTES: Final = 3 * 128 + 2 * _BOUND_BYTES


class ShardWriter:
    """A writer of parts, each with complete documents and at most `part_bytes`."""

    def __init__(
        self, folder: Path, manifest: CorpusManifest, *, part_bytes: int, vocab_size: int
    ) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)
        self.manifest = manifest
        if (folder / PARTIAL_FILE).is_file():
            self.manifest = CorpusManifest.read(folder / PARTIAL_FILE)
            check_same_corpus(folder, self.manifest, manifest.fingerprint)
        self._clear()

    def _clear(self) -> None:
        self._documents: list[Tokenised] = []
        self._num_bytes = _EMPTY_BYTES

    @property
    def end(self) -> CorpusPosition:
        """Position in the corpus right after the last part."""
        return self.manifest.parts[-1].end if self.manifest.parts else CorpusPosition()

    def write(self, documents: Iterable[Tokenised]) -> None:
        """Write documents, and mark the corpus as complete."""
        for document in documents:
            if not len(document.lengths):
                continue
            document_bytes = len(document.tokens) * self._dtype.itemsize
            document_bytes += (len(document.lengths) + 1) * _BOUND_BYTES
            if self._documents and self._num_bytes + document_bytes > self._part_bytes:
                self._write_part()
            self._documents.append(document)
            self._num_bytes += document_bytes
        if self._documents:
            self._write_part()
        if not self.manifest.parts:
            raise ShardError("The corpus contains no sentence. Add text.")
        os.replace(self._folder / PARTIAL_FILE, self._folder / SHARDS_FILE)
        sync(self._folder)

    def _write_part(self) -> None:
        name = f"part-{len(self.manifest.parts):05}"
        part = _join(self._documents, self._dtype)
        record = ShardRecord(
            name=name,
            num_tokens=part.num_tokens,
            num_sentences=part.num_sentences,
            num_documents=part.num_documents,
            end=self._documents[-1].end,
        )
        manifest = replace(self.manifest, parts=(*self.manifest.parts, record))
        try:
            (self._folder / name).mkdir(exist_ok=True)
            for array in ARRAYS:
                _save(self._folder / name / f"{array}.npy", getattr(part, array))
            sync(self._folder / name)
            write_atomically(self._folder / PARTIAL_FILE, manifest.to_json())
            sync(self._folder)
        except OSError as error:
            raise ShardError(
                f"{self._folder} cannot be written: {error.strerror or error}. "
                f"{len(self.manifest.parts)} complete parts are saved. Fix the problem and repeat "
                "the command to resume."
            ) from error
        self.manifest = manifest
        self._clear()


def check_same_corpus(folder: Path, manifest: CorpusManifest, fingerprint: str) -> None:
    """Check that a folder's manifest belongs to the corpus with this fingerprint."""
    if manifest.fingerprint != fingerprint:
        raise ShardError(
            f"{folder} contains another corpus, or tokens of another tokenizer. Delete it, or "
            "choose a new folder."
        )


def _join(documents: list[Tokenised], dtype: np.dtype[Any]) -> Shard:
    return Shard(
        tokens=np.concatenate([document.tokens.astype(dtype) for document in documents]),
        sentences=_bounds(np.concatenate([document.lengths for document in documents])),
        documents=_bounds(np.array([len(document.lengths) for document in documents])),
    )


def _bounds(lengths: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _save(file: Path, array: NDArray[Any]) -> None:
    """Save an array like np.save, but raise the system's error, for example if the disk is full."""
    with file.open("wb") as stream:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(stream, header)
        stream.write(array.data)
        stream.flush()
        os.fsync(stream.fileno())
