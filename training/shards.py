"""A tokenised corpus on disk: token ids with the bounds of sentences and documents.

A folder of `tokens.npy` (uint16 or int32, all documents one after the other), `sentences.npy`
(int64, start of each sentence in tokens, and the end), `documents.npy` (int64, start of each
document in sentences, and the end) and `shards.json`. The arrays are memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm

from training.corpus import find_files, read_documents, split_sentences
from training.errors import TrainingError

_ARRAYS = ("tokens", "sentences", "documents")
_DOCUMENTS_A_CHUNK = 256
# bincount makes int64 of what it counts, so that it is given a part at a time.
_TOKENS_A_COUNT = 1 << 22


class ShardError(TrainingError):
    """A tokenised corpus that cannot be read or made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """A tokenised corpus.

    Attributes:
        tokens: all token ids, without special tokens.
        sentences: bounds of sentences in `tokens`, one more than there are sentences.
        documents: bounds of documents in `sentences`, one more than there are documents.
    """

    tokens: NDArray[Any]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        """Documents that hold at least one sentence."""
        return len(self.documents) - 1

    def token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each token occurs; (vocab_size,)."""
        counts = np.zeros(vocab_size, np.int64)
        for begin in range(0, len(self.tokens), _TOKENS_A_COUNT):
            part = self.tokens[begin : begin + _TOKENS_A_COUNT]
            counts += np.bincount(part, minlength=vocab_size)
        return counts

    @classmethod
    def open(cls, folder: Path) -> Shards:
        """Memory-map a folder that `prepare` wrote.

        Raises:
            ShardError: a file is missing or damaged.
        """
        try:
            arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        except (OSError, ValueError, EOFError) as error:
            raise ShardError(
                f"{folder} cannot be read as a tokenised corpus: {error}; delete it to make it anew"
            ) from error
        shards = cls(**arrays)
        if not _are_bounds(shards.documents, len(shards.sentences) - 1):
            raise ShardError(f"{folder}: documents and sentences contradict; delete it")
        if not _are_bounds(shards.sentences, len(shards.tokens)):
            raise ShardError(f"{folder}: sentences and tokens contradict; delete it")
        return shards


def _are_bounds(bounds: NDArray[np.int64], end: int) -> bool:
    """Whether they ascend from 0 to `end`."""
    if bounds.ndim != 1 or len(bounds) < 2:
        return False
    return bool(bounds[0] == 0 and bounds[-1] == end and (np.diff(bounds) > 0).all())


def prepare(paths: Sequence[Path], tokenizer_file: Path, folder: Path) -> Shards:
    """Tokenise a corpus into `folder`, or open what an earlier call with the same input wrote.

    Raises:
        CorpusError: a file cannot be read.
        ShardError: the corpus holds no sentence.
    """
    files = find_files(paths)
    fingerprint = _fingerprint(files, tokenizer_file)
    if _read_fingerprint(folder) == fingerprint:
        return Shards.open(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        counts = _write(read_documents(files), Tokenizer.from_file(str(tokenizer_file)), partial)
        (partial / "shards.json").write_text(json.dumps({"fingerprint": fingerprint, **counts}))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Shards.open(folder)


def _read_fingerprint(folder: Path) -> str | None:
    """The fingerprint of the corpus that lies tokenised there; None where none does."""
    try:
        fingerprint: str = json.loads((folder / "shards.json").read_bytes())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return fingerprint


def _write(documents: Iterable[str], tokenizer: Tokenizer, folder: Path) -> dict[str, int]:
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32
    lengths: list[int] = []
    bounds = [0]
    with (folder / "tokens.bin").open("wb") as stream:
        progress = tqdm(documents, desc="tokenising", unit=" documents", disable=None)
        for chunk in _chunks(progress, _DOCUMENTS_A_CHUNK):
            sentences = [split_sentences(document) for document in chunk]
            flat = [sentence for document in sentences for sentence in document]
            ids = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
            for document in sentences:
                kept = [e.ids for e in islice(ids, len(document)) if e.ids]
                stream.writelines(np.asarray(sentence, dtype).tobytes() for sentence in kept)
                lengths += [len(sentence) for sentence in kept]
                if kept:
                    bounds.append(len(lengths))
    if not lengths:
        raise ShardError("the corpus holds no sentence")
    tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "sentences.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    np.save(folder / "documents.npy", np.asarray(bounds, np.int64))
    (folder / "tokens.bin").unlink()
    return {"tokens": len(tokens), "sentences": len(lengths), "documents": len(bounds) - 1}


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    stream = iter(items)
    while chunk := list(islice(stream, size)):
        yield chunk


def _fingerprint(files: Sequence[Path], tokenizer_file: Path) -> str:
    digest = hashlib.sha256(tokenizer_file.read_bytes())
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()
