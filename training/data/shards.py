"""A tokenised corpus on disk: token ids with the bounds of sentences and documents.

A folder of parts, `part-00000/` and on, each of three arrays that are memory-mapped:

- `tokens.npy`: uint16, or int32 where the vocabulary is over 65,536; all documents, one after
  the other, without special tokens
- `sentences.npy`: int64, begin of each sentence in the part's tokens, and their end
- `documents.npy`: int64, begin of each document in the part's sentences, and their end

and `shards.json`, which lists them with their sizes. `albert-serve prepare` writes it last, so that
a folder with it is complete; until then the same list is in `partial.json`.
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
# bincount converts its input to int64, so that it gets one piece at a time.
_TOKENS_A_COUNT: Final = 1 << 22


class ShardError(TrainingError):
    """A tokenised corpus that cannot be read or written."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shard:
    """Consecutive whole documents of a tokenised corpus.

    Attributes:
        tokens: (T,) uint16 or int32, token ids without special tokens.
        sentences: (S + 1,) int64, bounds of sentences in `tokens`, from 0 to T.
        documents: (D + 1,) int64, bounds of documents in sentences, from 0 to S.
    """

    tokens: NDArray[Any]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]
    cls_id: int = ALBERT_IDS.cls
    sep_id: int = ALBERT_IDS.sep

    @property
    def num_tokens(self) -> int:
        """Tokens of all its documents."""
        return len(self.tokens)

    @property
    def num_sentences(self) -> int:
        """Sentences, none of them empty."""
        return len(self.sentences) - 1

    @property
    def num_documents(self) -> int:
        """Documents, each of at least one sentence."""
        return len(self.documents) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """The entry of a part in `shards.json`.

    Attributes:
        end: position in the corpus right after it.
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
        tokenizer_sha256: hash of the tokens' `tokenizer.json`.
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
            raise ShardError(f"{file} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            raise ShardError(
                f"{file} is damaged, or of another version of this program; delete {file.parent} "
                "and prepare it again"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """A tokenised corpus in parts, at least one; hashes as in `CorpusManifest`."""

    parts: tuple[Shard, ...]
    tokenizer_sha256: str
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.num_tokens for part in self.parts)

    def token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Count the occurrences of each token; (vocab_size,) int64."""
        counts = np.zeros(vocab_size, np.int64)
        for tokens in chain.from_iterable(map(_pieces, self.parts)):
            highest = int(tokens.max())
            if highest >= vocab_size:
                raise ShardError(
                    f"the corpus has token id {highest}, the vocabulary {vocab_size} tokens; "
                    "prepare it with this vocabulary's tokenizer.json"
                )
            counts += np.bincount(tokens, minlength=vocab_size)
        return counts

    @classmethod
    def open(cls, folder: Path, tokenizer_file: Path | None = None) -> Shards:
        """Memory-map a folder that `albert-serve prepare` wrote, and check its parts.

        Sizes and bounds are checked.
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
    for begin in range(0, part.num_tokens, _TOKENS_A_COUNT):
        yield part.tokens[begin : begin + _TOKENS_A_COUNT]


def _open_part(folder: Path, record: ShardRecord, manifest: CorpusManifest) -> Shard:
    """Memory-map a part, and check it against its record."""
    part_folder = folder / record.name
    try:
        # Plain arrays, since slices of np.memmap cost several times as much.
        arrays = {
            name: np.asarray(np.load(part_folder / f"{name}.npy", mmap_mode="r")) for name in ARRAYS
        }
    except (OSError, ValueError, EOFError) as error:
        raise ShardError(
            f"{part_folder} lacks files, or they are damaged: {error}; delete {folder} and prepare "
            "it again"
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
            f"{part_folder}: the files contradict each other, or {SHARDS_FILE}; delete {folder} "
            "and prepare it again"
        )
    return part


def _read_manifest(folder: Path) -> CorpusManifest:
    file = folder / SHARDS_FILE
    if file.is_file():
        return CorpusManifest.read(file)
    if (folder / PARTIAL_FILE).is_file():
        raise ShardError(f"{folder} is not whole; give the command that was preparing it again")
    raise ShardError(f"{folder} holds no {SHARDS_FILE}; make it with albert-serve prepare")


def _check_tokenizer(folder: Path, manifest: CorpusManifest, tokenizer_file: Path) -> None:
    try:
        sha256 = sha256_of(tokenizer_file)
    except OSError as error:
        raise ShardError(f"{tokenizer_file} cannot be read: {error.strerror}") from error
    if sha256 != manifest.tokenizer_sha256:
        raise ShardError(
            f"{folder} was prepared with another tokenizer than {tokenizer_file}; "
            "give that one, or prepare the corpus again with this one"
        )


def _are_bounds(bounds: NDArray[Any], end: int) -> bool:
    """Whether `bounds` are int64 and ascend from 0 to `end`."""
    if bounds.dtype != np.int64 or bounds.ndim != 1 or len(bounds) < 2:
        return False
    return bool(bounds[0] == 0 and bounds[-1] == end and (np.diff(bounds) > 0).all())
