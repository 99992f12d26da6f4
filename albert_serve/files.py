"""Files: SHA-256, atomic replacement, and synchronisation to disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, read as a stream, as hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new, also after a crash.

    Raises:
        OSError: it cannot be written; the old content is kept.
    """
    partial = partial_path(file)
    partial.write_bytes(content)
    put_in_place(partial, file)


def partial_path(path: Path) -> Path:
    """Return the temporary name of a file or folder until it is complete."""
    return path.with_name(path.name + ".partial")


def put_in_place(partial: Path, path: Path) -> None:
    """Sync a partial file to disk, then rename it to `path`."""
    sync(partial)
    os.replace(partial, path)


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
