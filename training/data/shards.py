"""A tokenised corpus on disk: token ids with the bounds of sentences and documents.

A folder contains parts, `part-00000/` and so on. Each part has three memory-mapped arrays:

- `tokens.npy`: token ids of all documents in order, without special tokens, as uint16, or as int32
  if the vocabulary has more than 65,536 tokens
- `sentences.npy`: int64 index of each sentence's first token, and the last sentence's end
- `documents.npy`: int64 index of each document's first sentence, and the last document's end

`shards.json` lists the parts with their sizes. `albert-serve prepare` writes it last, so a folder
with this file is complete. Until then, `partial.json` contains the list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from albert_serve.files import sha256_of
from albert_serve.tokenizer import ALBERT_IDS
from training.data.corpus import CorpusPosition
from training.errors import TrainingError

ARRAYS: Final = ("tokens", "sentences", "documents")
SHARDS_FILE: Final = "shards.json"
PARTIAL_FILE: Final = "partial.json"
_TOKEN_DTYPES: Final = (np.uint16, np.int32)
# Number of tokens to count at a time, because bincount copies its input as int64.
_PIECE_TOKENS: Final = 1 << 22


class ShardError(TrainingError):
    """A tokenised corpus that cannot be read or written."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shard:
    """Consecutive complete documents of a tokenised corpus.

    Attributes:
        tokens: (T,) uint16 or int32, token ids without special tokens.
        sentences: (S + 1,) int64, bounds of sentences in `tokens`, from 0 to T.
        documents: (D + 1,) int64, bounds of documents in sentences, from 0 to S.
        cls_id, sep_id: ids of [CLS] and [SEP].
    """

    tokens: NDArray[Any]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]
    cls_id: int = ALBERT_IDS.cls
    sep_id: int = ALBERT_IDS.sep

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without special tokens."""
        return len(self.tokens)

    @property
    def num_sentences(self) -> int:
        """Number of sentences, none of them empty."""
        return len(self.sentences) - 1

    @property
    def num_documents(self) -> int:
        """Number of documents, each with at least one sentence."""
        return len(self.documents) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """The entry of a part in `shards.json`.

    Attributes:
        end: position in the corpus right after the part.
    """

    name: str
    num_tokens: int
    num_sentences: int
    num_documents: int
    end: CorpusPosition


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusManifest:
    """The content of `shards.json`.

    Attributes:
        tokenizer_sha256: hash of the `tokenizer.json` that produced the tokens.
        fingerprint: hash of everything that the tokens depend on.
    """

    format: Literal[2] = 2
    tokenizer_sha256: str
    fingerprint: str
    cls_id: int = ALBERT_IDS.cls
    sep_id: int = ALBERT_IDS.sep
    parts: tuple[ShardRecord, ...] = ()

    def to_json(self) -> bytes:
        """Serialise the manifest."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def read(cls, file: Path) -> CorpusManifest:
        """Read a manifest that `to_json` serialised."""
        try:
            return TypeAdapter(cls).validate_json(file.read_bytes())
        except OSError as error:
            raise ShardError(f"{file} cannot be read: {error.strerror}.") from error
        except ValidationError as error:
            raise ShardError(
                f"{file} is damaged, or another version of albert-serve wrote it. "
                f"{_again(file.parent)}"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """A tokenised corpus of one or more parts, with the hashes that `CorpusManifest` describes."""

    parts: tuple[Shard, ...]
    tokenizer_sha256: str
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all parts."""
        return sum(part.num_tokens for part in self.parts)

    def token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Return the number of occurrences of each token, as int64 (vocab_size,)."""
        counts = np.zeros(vocab_size, np.int64)
        for tokens in chain.from_iterable(map(_pieces, self.parts)):
            highest = int(tokens.max())
            if highest >= vocab_size:
                raise ShardError(
                    f"The corpus has token id {highest}, the vocabulary only {vocab_size} tokens. "
                    "Prepare the corpus with this vocabulary's tokenizer.json."
                )
            counts += np.bincount(tokens, minlength=vocab_size)
        return counts

    @classmethod
    def open(cls, folder: Path, tokenizer_file: Path | None = None) -> Shards:
        """Memory-map a folder that `albert-serve prepare` wrote, and check its sizes and bounds.

        Args:
            tokenizer_file: `tokenizer.json` that must have produced the tokens, or None for any.
        """
        manifest = _read_manifest(folder)
        if tokenizer_file is not None:
            _check_tokenizer(folder, manifest, tokenizer_file)
        return cls(
            parts=tuple(_open_part(folder, record, manifest) for record in manifest.parts),
            tokenizer_sha256=manifest.tokenizer_sha256,
            fingerprint=manifest.fingerprint,
        )


def _pieces(part: Shard) -> Iterator[NDArray[Any]]:
    for begin in range(0, part.num_tokens, _PIECE_TOKENS):
        yield part.tokens[begin : begin + _PIECE_TOKENS]


def _open_part(folder: Path, record: ShardRecord, manifest: CorpusManifest) -> Shard:
    """Memory-map a part, and check it against its record."""
    part_folder = folder / record.name
    try:
        # Slicing a plain array is several times as fast as slicing an np.memmap.
        arrays = {
            name: np.asarray(np.load(part_folder / f"{name}.npy", mmap_mode="r")) for name in ARRAYS
        }
    except (OSError, ValueError, EOFError) as error:
        raise ShardError(
            f"{part_folder} has missing or damaged files: {error}. {_again(folder)}"
        ) from error
    part = Shard(**arrays, cls_id=manifest.cls_id, sep_id=manifest.sep_id)
    sizes = (part.num_tokens, part.num_sentences, part.num_documents)
    if (
        part.tokens.dtype not in _TOKEN_DTYPES
        or not _are_bounds(part.documents, part.num_sentences)
        or not _are_bounds(part.sentences, part.num_tokens)
        or sizes != (record.num_tokens, record.num_sentences, record.num_documents)
    ):
        raise ShardError(
            f"{part_folder} has files that contradict each other or {SHARDS_FILE}. {_again(folder)}"
        )
    return part


def _again(folder: Path) -> str:
    return f"Delete {folder} and prepare it again."


def _read_manifest(folder: Path) -> CorpusManifest:
    file = folder / SHARDS_FILE
    if file.is_file():
        return CorpusManifest.read(file)
    if (folder / PARTIAL_FILE).is_file():
        raise ShardError(f"{folder} is incomplete. Repeat the command that was preparing it.")
    raise ShardError(f"{folder} has no {SHARDS_FILE}. Create it with albert-serve prepare.")


def _check_tokenizer(folder: Path, manifest: CorpusManifest, tokenizer_file: Path) -> None:
    try:
        sha256 = sha256_of(tokenizer_file)
    except OSError as error:
        raise ShardError(f"{tokenizer_file} cannot be read: {error.strerror}.") from error
    if sha256 != manifest.tokenizer_sha256:
        raise ShardError(
            f"{folder} was prepared with another tokenizer than {tokenizer_file}. Pass that "
            "tokenizer, or prepare the corpus again with this one."
        )


def _are_bounds(bounds: NDArray[Any], end: int) -> bool:
    """Return whether `bounds` are int64 and ascend from 0 to `end`."""
    if bounds.dtype != np.int64 or bounds.ndim != 1 or len(bounds) < 2:
        return False
    return bool(bounds[0] == 0 and bounds[-1] == end and (np.diff(bounds) > 0).all())
