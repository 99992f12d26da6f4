"""Reading of small files that somebody else wrote."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_small_file(file: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file; never waits for a pipe or reads a device for ever.

    Raises:
        OSError: the file is missing, is not a regular file, or has more than `max_bytes`.
    """
    # Without O_NONBLOCK opening a pipe would wait for its writer.
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{file} is not a regular file")
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{file} has more than {max_bytes} bytes")
    return content
