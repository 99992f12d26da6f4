"""A tokenised corpus on disk: token ids with the bounds of sentences and documents.

A folder of parts, `part-00000/` and on, each of three arrays that are memory-mapped:

- `tokens.npy`: uint16, or int32 where the vocabulary is over 65,536; all documents, one after
  the other, without special tokens
- `sentences.npy`: int64, begin of each sentence in the part's tokens, and their end
- `documents.npy`: int64, begin of each document in the part's sentences, and their end

and `shards.json`, which lists them with their sizes. `training.prepare` writes it last, so that a
folder with it is complete; until then the same list is in `partial.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.files import sha256_of
from training.errors import TrainingError

ARRAYS: Final = ("tokens", "sentences", "documents")
SHARDS_FILE: Final = "shards.json"
PARTIAL_FILE: Final = "partial.json"
_FORMAT: Final = 2
_TOKEN_DTYPES: Final = (np.uint16, np.int32)
# bincount converts its input to int64, so that it gets one piece at a time.
_TOKENS_A_COUNT: Final = 1 << 22


class ShardError(TrainingError):
    """A tokenised corpus that cannot be read or written."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """Consecutive whole documents of a tokenised corpus.

    Attributes:
        tokens: (T,) uint16 or int32, token ids without special tokens.
        sentences: (S + 1,) int64, bounds of sentences in `tokens`, from 0 to T.
        documents: (D + 1,) int64, bounds of documents in sentences, from 0 to S.
    """

    tokens: NDArray[Any]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]

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

    @property
    def num_bytes(self) -> int:
        """Bytes of the three arrays."""
        return self.tokens.nbytes + self.sentences.nbytes + self.documents.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """The entry of a part in `shards.json`.

    Attributes:
        end: position in the corpus right after it: number of whole files read, of documents of
            the next one, and of bytes of all files on disk.
    """

    name: str
    num_tokens: int
    num_sentences: int
    num_documents: int
    end: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of `shards.json`.

    Attributes:
        tokenizer_sha256: hash of the tokens' `tokenizer.json`.
        fingerprint: hash of everything that the tokens depend on.
    """

    tokenizer_sha256: str
    fingerprint: str
    parts: tuple[PartRecord, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.num_tokens for part in self.parts)

    def to_json(self) -> bytes:
        """Serialise the manifest."""
        return (json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n").encode()

    @classmethod
    def read(cls, file: Path) -> Manifest:
        """Read a manifest that `to_json` serialised.

        Raises:
            ShardError: the file is missing, damaged, or of another format.
        """
        try:
            entries = json.loads(file.read_bytes())
            if entries.pop("format", 1) != _FORMAT:
                raise ShardError(f"{file} is of another version of this program")
            parts = tuple(_part_record(part) for part in entries.pop("parts"))
            manifest = cls(**entries, parts=parts)
        except OSError as error:
            raise ShardError(f"{file} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = error if isinstance(error, ShardError) else f"{file} is damaged: {error!r}"
            raise ShardError(str(reason)) from error
        for number, part in enumerate(parts):
            if part.name != part_name(number):
                raise ShardError(f"{file} is damaged: part {number} is called {part.name!r}")
        return manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """A tokenised corpus.

    Attributes:
        parts: at least one, each of whole documents.
        tokenizer_sha256: hash of the tokens' `tokenizer.json`.
        fingerprint: hash of the corpus, the tokenizer and all else that the tokens depend on.
    """

    parts: tuple[Part, ...]
    tokenizer_sha256: str
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_sentences(self) -> int:
        """Sentences of all parts."""
        return sum(part.num_sentences for part in self.parts)

    @property
    def num_documents(self) -> int:
        """Documents of at least one sentence."""
        return sum(part.num_documents for part in self.parts)

    def token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Count the occurrences of each token; (vocab_size,) int64.

        Raises:
            ShardError: an id is not below `vocab_size`.
        """
        counts = np.zeros(vocab_size, np.int64)
        for tokens in self._pieces():
            highest = int(tokens.max())
            if highest >= vocab_size:
                raise ShardError(
                    f"the corpus has token id {highest}, the vocabulary {vocab_size} tokens; "
                    "prepare it with this vocabulary's tokenizer.json"
                )
            counts += np.bincount(tokens, minlength=vocab_size)
        return counts

    def _pieces(self) -> Iterator[NDArray[Any]]:
        for part in self.parts:
            for begin in range(0, part.num_tokens, _TOKENS_A_COUNT):
                yield part.tokens[begin : begin + _TOKENS_A_COUNT]

    @classmethod
    def open(cls, folder: Path, tokenizer_file: Path | None = None) -> Shards:
        """Memory-map a folder that `training.prepare` wrote, and check its parts.

        Sizes and bounds are checked.

        Args:
            folder: the `--output` of `training.prepare`.
            tokenizer_file: the `tokenizer.json` to compare with that of the tokens.

        Raises:
            ShardError: it is incomplete, a file is missing or damaged, or the tokens are another
                tokenizer's.
        """
        manifest = _read_manifest(folder)
        if tokenizer_file is not None:
            _check_tokenizer(folder, manifest, tokenizer_file)
        try:
            parts = tuple(open_part(folder, record) for record in manifest.parts)
        except ShardError as error:
            raise ShardError(f"{error}; delete {folder} and prepare it again") from error
        return cls(
            parts=parts,
            tokenizer_sha256=manifest.tokenizer_sha256,
            fingerprint=manifest.fingerprint,
        )


def _part_record(entry: Mapping[str, Any]) -> PartRecord:
    num_files, num_documents, num_bytes = map(int, entry["end"])
    return PartRecord(
        name=entry["name"],
        num_tokens=entry["num_tokens"],
        num_sentences=entry["num_sentences"],
        num_documents=entry["num_documents"],
        end=(num_files, num_documents, num_bytes),
    )


def part_name(number: int) -> str:
    """Return the folder's name of a part, counted from 0."""
    return f"part-{number:05}"


def open_part(folder: Path, record: PartRecord) -> Part:
    """Memory-map a part, and check it against its record.

    Raises:
        ShardError: a file is missing or damaged; the message names it.
    """
    arrays = {name: _open_array(folder / record.name / f"{name}.npy") for name in ARRAYS}
    part = Part(**arrays)
    if part.tokens.dtype not in _TOKEN_DTYPES or part.tokens.ndim != 1:
        raise ShardError(f"{folder / record.name}: tokens.npy holds no token ids")
    if not _are_bounds(part.documents, part.num_sentences):
        raise ShardError(f"{folder / record.name}: documents.npy and sentences.npy contradict")
    if not _are_bounds(part.sentences, part.num_tokens):
        raise ShardError(f"{folder / record.name}: sentences.npy and tokens.npy contradict")
    sizes = (part.num_tokens, part.num_sentences, part.num_documents)
    recorded = (record.num_tokens, record.num_sentences, record.num_documents)
    if sizes != recorded:
        raise ShardError(
            f"{folder / record.name} holds {sizes} tokens, sentences and documents, "
            f"not {recorded} as recorded"
        )
    return part


def _read_manifest(folder: Path) -> Manifest:
    file = folder / SHARDS_FILE
    if file.is_file():
        try:
            manifest = Manifest.read(file)
        except ShardError as error:
            raise ShardError(f"{error}; delete {folder} and prepare it again") from error
        if not manifest.parts:
            raise ShardError(f"{file} names no part; delete {folder} and prepare it again")
        return manifest
    if (folder / PARTIAL_FILE).is_file():
        raise ShardError(f"{folder} is not whole; give the command that was preparing it again")
    raise ShardError(f"{folder} holds no {SHARDS_FILE}; make it with python -m training.prepare")


def _check_tokenizer(folder: Path, manifest: Manifest, tokenizer_file: Path) -> None:
    try:
        sha256 = sha256_of(tokenizer_file)
    except OSError as error:
        raise ShardError(f"{tokenizer_file} cannot be read: {error.strerror}") from error
    if sha256 != manifest.tokenizer_sha256:
        raise ShardError(
            f"{folder} was prepared with another tokenizer than {tokenizer_file}; "
            "give that one, or prepare the corpus again with this one"
        )


def _open_array(file: Path) -> NDArray[Any]:
    try:
        # A plain array, since slices of np.memmap cost several times as much.
        return np.asarray(np.load(file, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        raise ShardError(f"{file} is missing or damaged: {error}") from error


def _are_bounds(bounds: NDArray[Any], end: int) -> bool:
    """Whether `bounds` are int64 and ascend from 0 to `end`."""
    if bounds.dtype != np.int64 or bounds.ndim != 1 or len(bounds) < 2:
        return False
    return bool(bounds[0] == 0 and bounds[-1] == end and (np.diff(bounds) > 0).all())
