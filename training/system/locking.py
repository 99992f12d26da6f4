"""Locks on folders against other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor


@contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Lock a folder until the end of `with`; yield False if another process holds the lock.

    The folder itself is locked, so that no lock file appears in it. On a file system without locks
    the result is True.

    Raises:
        OSError: the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError:
        return True
