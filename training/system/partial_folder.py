"""Folders that have another name until they are complete; what killed processes left is removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from training.system.locking import locked_folder


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Create a folder beside `target`, to be put in its place; if it is not, it is removed.

    What killed processes left there is removed first (`remove_leftovers`).

    Raises:
        OSError: it cannot be created.
    """
    remove_leftovers(target)
    folder = target.with_name(f".{target.name}.{os.getpid()}.partial")
    folder.mkdir(parents=True)
    try:
        with locked_folder(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Create a partial folder that gets the name of `target` at the end of the block.

    A target that is an empty folder is replaced.

    Raises:
        FileExistsError: the target is there already.
        OSError: it cannot be created, or put in place.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there already; name a new folder")
    target = target.resolve()
    with partial_folder(target) as folder:
        yield folder
        folder.rename(target)


def put_folder_in_place(folder: Path, target: Path) -> None:
    """Move a partial folder to its target; a folder that is there is kept if that fails."""
    if not target.exists():
        folder.rename(target)
        return
    old = folder.with_suffix(".old")
    with locked_folder(target):
        target.rename(old)
        try:
            folder.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old)


def remove_leftovers(target: Path) -> None:
    """Remove the partial folders of a target whose processes were killed.

    A target that had been moved away, and not yet replaced, is put back.
    """
    form = re.compile(rf"\.{re.escape(target.name)}\.(\d{{1,10}})\.(partial|old)")
    with suppress(OSError):  # they do not hinder what comes
        for folder in sorted(target.parent.iterdir()):
            match = form.fullmatch(folder.name)
            if match and not _is_running(int(match[1])):
                _remove(folder, target)


def _remove(folder: Path, target: Path) -> None:
    with locked_folder(folder) as is_left:  # by processes of other containers, too
        if not is_left:
            return
        if folder.suffix == ".old" and not target.exists():
            folder.rename(target)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    """Whether another process has the number; in containers ours often had it before."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
