"""Small files are read at once, whatever lies in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from albert_serve.files import read_small_file


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_small_file(file, 5) == b"12345"
    with pytest.raises(OSError, match="has more than 4 bytes"):
        read_small_file(file, 4)


def test_pipes_devices_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match=f"{file} is not a regular file"):
            read_small_file(file, 5)
    with pytest.raises(OSError, match="directory"):
        read_small_file(tmp_path, 5)
    with pytest.raises(FileNotFoundError):
        read_small_file(tmp_path / "missing", 5)
