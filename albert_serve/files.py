"""Files: local names, bounded reading, SHA-256, atomic replacement, synchronisation to disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import uuid4

# A training run's folder has links with these names, which no model on the Hub has.
_LINKS: Final = ("best", "checkpoint")


def local_path(name: str | os.PathLike[str]) -> Path | None:
    """Return the path of a local model, or None for a name on the Hugging Face Hub.

    A name is a path if it exists, if it begins with ".", "/" or "~" or ends in "/", or if its first
    part is a local folder. So a missing folder is not requested from the Hub, where anyone can
    register its name.
    """
    text = os.fspath(name)
    path = Path(os.path.expanduser(text))
    is_path = (
        isinstance(name, os.PathLike)
        or text.startswith((".", "/", "~"))
        or text.endswith("/")
        or os.path.lexists(path)
        or path.name in _LINKS
        or Path(*path.parts[:1]).is_dir()
    )
    return path if is_path else None


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, read as a stream, as hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old or the new content, even after a crash."""
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


@contextmanager
def replace_folder(target: Path, *, mode: int = 0o755) -> Iterator[Path]:
    """Create a folder next to `target` that replaces it at the end of the block.

    The files are on disk before the folder gets its name. After an error, the folder is removed,
    and `target` is unchanged. A killed process leaves the folder as `.NAME.*.partial`, and between
    the two renames, the old content as `.NAME.*.old`.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.{uuid4().hex[:8]}.partial")
    old = folder.with_suffix(".old")
    folder.mkdir(mode)
    try:
        yield folder
        for path in (*folder.rglob("*"), folder):
            sync(path)
        if target.exists():
            target.rename(old)
        folder.rename(target)
        sync(target.parent)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        for path in (folder, old):
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_small_file(file: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Pipes and devices are errors.

    Raises:
        OSError: the file cannot be read, is not regular, or has more than `max_bytes`.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{file} is not a regular file")
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{file} has more than {max_bytes} bytes")
    return content
