"""Files are read within bounds, and replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from albert_serve.files import put_in_place, read_small_file, write_atomically


def test_a_file_that_cannot_be_synced_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError("no space left")

    file = tmp_path / "a"
    file.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"old")
    with file.open("rb") as reader:
        write_atomically(file, b"new content")
        assert reader.read() == b"old"
    assert file.read_bytes() == b"new content"
    (tmp_path / "b").write_bytes(b"third")
    put_in_place(tmp_path / "b", file)
    assert [f.name for f in tmp_path.iterdir()] == ["a"]
    assert file.read_bytes() == b"third"


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
