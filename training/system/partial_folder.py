"""Folders that have another name until they are complete."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from albert_serve.files import sync


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Create a folder beside `target`, to be put in its place; if it is not, it is removed.

    A killed process leaves it, as `.TARGET.*.partial`, to be deleted by hand.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    folder.chmod(0o755)  # mkdtemp's is its owner's alone; another user may serve what is in it
    try:
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
        _sync(folder)
        folder.rename(target)


def put_folder_in_place(folder: Path, target: Path) -> None:
    """Sync a partial folder to disk and move it to its target; if that fails, the old one stays."""
    _sync(folder)
    if not target.exists():
        folder.rename(target)
        return
    old = folder.with_suffix(".old")
    target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)
