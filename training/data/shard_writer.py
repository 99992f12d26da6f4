"""Crash-safe writer of a tokenised corpus, part by part.

A part is written under a temporary name and renamed, then recorded in `partial.json`. After the
last part, that file becomes `shards.json`: a folder that has one is complete. Parts of another
corpus are removed when the first part of the new one is written; other files never are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.files import put_in_place, sync
from training.data.shards import (
    ARRAYS,
    PARTIAL_FILE,
    SHARDS_FILE,
    Manifest,
    Part,
    PartRecord,
    ShardError,
    open_part,
    part_name,
)
from training.system.locking import locked_folder

_HALF: Final = ".half"
_PART: Final = re.compile(rf"part-[0-9]{{5,}}({re.escape(_HALF)})?")
_FILES: Final = (SHARDS_FILE, PARTIAL_FILE, PARTIAL_FILE + _HALF)


class ShardWriter:
    """Writer of a corpus' parts into a folder; resumes the corpus if the folder has some of it.

    Attributes:
        manifest: the parts written so far, also by an earlier process.
    """

    def __init__(self, folder: Path, *, tokenizer_sha256: str, fingerprint: str) -> None:
        self._folder = folder
        self.manifest = Manifest(
            tokenizer_sha256=tokenizer_sha256, fingerprint=fingerprint, parts=()
        )
        self._is_begun = False
        known = _read_partial(folder)
        if known is not None and replace(known, parts=()) == self.manifest:
            self.manifest = replace(known, parts=_intact_parts(folder, known.parts))

    def add(self, part: Part, end: tuple[int, int, int]) -> None:
        """Write the next part; `end` is the position in the corpus right after it.

        Raises:
            ShardError: it cannot be written; earlier parts are kept.
        """
        name = part_name(len(self.manifest.parts))
        try:
            self._begin()
            half = self._folder / (name + _HALF)
            _write_part(half, part)
            record = PartRecord(
                name=name,
                num_tokens=part.num_tokens,
                num_sentences=part.num_sentences,
                num_documents=part.num_documents,
                end=end,
            )
            os.rename(half, self._folder / name)
            self._record((*self.manifest.parts, record))
        except OSError as error:
            _clear_half(self._folder / (name + _HALF))
            raise self._error(error) from error

    def complete(self) -> None:
        """Mark the corpus as complete.

        Raises:
            ShardError: it cannot be written.
        """
        try:
            self._begin()
            os.replace(self._folder / PARTIAL_FILE, self._folder / SHARDS_FILE)
            sync(self._folder)
        except OSError as error:
            raise self._error(error) from error

    def _begin(self) -> None:
        """Remove parts of another corpus, once."""
        if self._is_begun:
            return
        self._record(self.manifest.parts)
        (self._folder / SHARDS_FILE).unlink(missing_ok=True)
        sync(self._folder)
        kept = {part.name for part in self.manifest.parts}
        for path in sorted(self._folder.iterdir()):
            if path.is_dir() and _PART.fullmatch(path.name) and path.name not in kept:
                _remove_part(path)
        self._is_begun = True

    def _record(self, parts: tuple[PartRecord, ...]) -> None:
        manifest = replace(self.manifest, parts=parts)
        half = self._folder / (PARTIAL_FILE + _HALF)
        half.write_bytes(manifest.to_json())
        put_in_place(half, self._folder / PARTIAL_FILE)
        sync(self._folder)
        self.manifest = manifest

    def _error(self, error: OSError) -> ShardError:
        return ShardError(
            f"{self._folder} cannot be written: {error.strerror or error}; whole parts are kept "
            f"({len(self.manifest.parts)}), with that mended the same command resumes from them"
        )


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Create the folder, and lock it against other processes; for `with`.

    A folder that stays empty is removed again.

    Raises:
        ShardError: it cannot be created, another process holds the lock, or it has other files.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_ours = stack.enter_context(locked_folder(folder))
        except OSError as error:
            raise ShardError(f"{folder} cannot be written: {error.strerror}") from error
        if not is_ours:
            raise ShardError(f"{folder} is being prepared by another process; wait for it")
        try:
            _refuse_others(folder)
            yield
        finally:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _refuse_others(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    if names & set(_FILES):
        return
    for name in sorted(names):
        if not _PART.fullmatch(name):
            raise ShardError(
                f"{folder} holds {name} and no tokenised corpus; give a new or an empty folder"
            )


def _read_partial(folder: Path) -> Manifest | None:
    try:
        return Manifest.read(folder / PARTIAL_FILE)
    except ShardError:
        return None


def _intact_parts(folder: Path, records: tuple[PartRecord, ...]) -> tuple[PartRecord, ...]:
    """Return the parts before the first of which a file is missing or truncated."""
    for number, record in enumerate(records):
        try:
            open_part(folder, record)
        except ShardError:
            return records[:number]
    return records


def _write_part(folder: Path, part: Part) -> None:
    folder.mkdir(exist_ok=True)
    for name in ARRAYS:
        _save(folder / f"{name}.npy", getattr(part, name))
    sync(folder)


def _save(file: Path, array: NDArray[Any]) -> None:
    """Save as np.save does, but with the system's error, such as a full disk."""
    with file.open("wb") as stream:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(stream, header)
        stream.write(array.data)
        stream.flush()
        os.fsync(stream.fileno())


def _clear_half(folder: Path) -> None:
    """Remove a part that could not be written, to free its disk space."""
    with suppress(OSError, ShardError):
        _remove_part(folder)


def _remove_part(folder: Path) -> None:
    for name in ARRAYS:
        (folder / f"{name}.npy").unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        raise ShardError(f"{folder} cannot be removed: {error.strerror}; move it away") from error
