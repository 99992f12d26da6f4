"""A folder appears whole or not at all, and what a killed process left is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.system.locking import locked_folder
from training.system.partial_folder import (
    new_folder,
    partial_folder,
    put_folder_in_place,
    remove_leftovers,
)

NAME = "bundle"


@pytest.fixture
def dead_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left(folder: Path, pid: int, kind: str, name: str = NAME) -> Path:
    made = folder / f".{name}.{pid}.{kind}"
    made.mkdir()
    (made / "file").write_text(kind)
    return made


def test_a_folder_is_put_in_place_whole_or_removed(tmp_path: Path) -> None:
    target = tmp_path / "new" / NAME
    with pytest.raises(FileNotFoundError), partial_folder(target) as folder:
        (folder / "none").rename(folder / "file")
    assert list(target.parent.iterdir()) == []
    for content in ("1", "2"):
        with partial_folder(target) as folder:
            (folder / "file").write_text(content)
            put_folder_in_place(folder, target)
        assert list(target.parent.iterdir()) == [target]
        assert (target / "file").read_text() == content


def test_a_new_folder_is_put_in_place_at_the_end_or_removed(tmp_path: Path) -> None:
    target = tmp_path / NAME
    target.mkdir()
    with pytest.raises(ZeroDivisionError), new_folder(target) as folder:
        _ = 1 / (len(list(folder.iterdir())))
    assert [*tmp_path.rglob("*")] == [target]
    with new_folder(target) as folder:
        (folder / "file").write_text("1")
        assert list(target.iterdir()) == []
    assert [*tmp_path.rglob("*")] == [target, target / "file"]
    for existing in (target, target / "file"):
        with (
            pytest.raises(FileExistsError, match=f"^{existing} is there already; name a new folde"),
            new_folder(existing),
        ):
            pytest.fail("nothing is to be written")
    assert [*tmp_path.rglob("*")] == [target, target / "file"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path, dead_pid: int) -> None:
    target = tmp_path / NAME
    target.mkdir()
    for pid, kind in ((dead_pid, "partial"), (dead_pid, "old"), (os.getpid(), "partial")):
        left(tmp_path, pid, kind)
    others = {
        left(tmp_path, dead_pid, "partial", "other"),
        left(tmp_path, os.getppid(), "partial"),  # of a process that runs
        left(tmp_path, dead_pid, "copy"),
    }
    with partial_folder(target) as folder:
        assert {*tmp_path.iterdir()} == {target, folder, *others}


def test_a_folder_that_another_container_writes_is_kept(tmp_path: Path, dead_pid: int) -> None:
    folder = left(tmp_path, dead_pid, "partial")
    with locked_folder(folder):
        remove_leftovers(tmp_path / NAME)
        assert folder.exists()
    remove_leftovers(tmp_path / NAME)
    assert not folder.exists()


def test_a_target_that_was_moved_away_is_put_back(tmp_path: Path, dead_pid: int) -> None:
    left(tmp_path, dead_pid, "old")
    remove_leftovers(tmp_path / NAME)
    assert [*tmp_path.iterdir()] == [tmp_path / NAME]
    assert (tmp_path / NAME / "file").read_text() == "old"
