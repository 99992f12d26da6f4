"""A run's checkpoints: each whole or not there, hashed, the older ones removed.

`checkpoints/step-00001000/` holds a Hugging Face directory, `state.pt` with what training needs to
go on, and `hashes.json`; `checkpoint` is a link to the newest. A checkpoint that was found damaged
is put aside as `step-00001000.damaged` and goes with the next rotation.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import torch

from training.loop.progress import RunError

_STEP: Final = re.compile(r"step-(\d{8,})")
_HASHES: Final = "hashes.json"
_STATE: Final = "state.pt"
_PARTIAL: Final = ".partial"
_DAMAGED: Final = ".damaged"
# What a file that cannot be written whole raises: Python's, torch's and safetensors' own.
_UNWRITABLE: Final = (OSError, RuntimeError, safetensors.SafetensorError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """The checkpoints in a run's folder.

    Attributes:
        num_kept: how many of the newest stay.

    Raises:
        RunError: the folder is that of an earlier version's run.
    """

    folder: Path
    num_kept: int = 2

    def __post_init__(self) -> None:
        link = self.folder / "checkpoint"
        if link.is_dir() and not link.is_symlink() and not (link / _HASHES).is_file():
            raise RunError(
                f"{link} was written by an earlier version; give another --output, and "
                "--initialize-from to begin with its weights"
            )

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        """Write the checkpoint of a step, and remove those that are too many.

        Args:
            write: writes the model and all that goes with it into a folder.
            state: what training needs to go on, as `load_state` gives it back.

        Raises:
            RunError: it cannot be written; those before it are as they were.
        """
        if not self.at(step).is_dir():
            self._save(step, write, state)
        self._remove_old()

    def _save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        final = self.at(step)
        partial = final.with_name(final.name + _PARTIAL)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            # Into a stream of Python's, whose errors say what is wrong with the disk.
            with (partial / _STATE).open("wb") as stream:
                torch.save(state, stream)
            _seal(partial)
            os.replace(partial, final)
            _sync(self._all)
            self._link(final)
        except _UNWRITABLE as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RunError(
                f"the checkpoint of step {step:,} could not be written: {_reason(error)}; "
                f"{self._last()}"
            ) from error

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole; None where there is none at all.

        What a process that was killed left half-written is removed. Checkpoints whose files are
        not what was written are reported, and put aside where an older one is whole.

        Raises:
            RunError: there are checkpoints, and none is whole.
        """
        for left in self._all.glob("*" + _PARTIAL):
            shutil.rmtree(left)
        self._take_in_copy()
        damaged: list[Path] = []
        for folder in self._steps():
            damage = find_damage(folder)
            if damage is None:
                for each in damaged:
                    _put_aside(each)
                self._link(folder)
                return folder
            print(f"warning: passed over {folder}: {damage}", file=sys.stderr)
            damaged.append(folder)
        if damaged:
            raise RunError(f"no checkpoint in {self._all} is whole; give another --output")
        return None

    def at(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self._all / f"step-{step:08}"

    @property
    def _all(self) -> Path:
        return self.folder / "checkpoints"

    def _steps(self) -> list[Path]:
        """The newest first."""
        found = [path for path in self._all.glob("step-*") if _STEP.fullmatch(path.name)]
        return sorted(found, key=step_of, reverse=True)

    def _last(self) -> str:
        last = next(iter(self._steps()), None)
        return f"the last one, {last}, is whole" if last else "there is none before it"

    def _remove_old(self) -> None:
        for old in (*self._steps()[self.num_kept :], *self._all.glob("*" + _DAMAGED)):
            # Not by and by under its name: what is half removed is no checkpoint.
            partial = old.with_name(old.name + _PARTIAL)
            os.replace(old, partial)
            shutil.rmtree(partial)

    def _take_in_copy(self) -> None:
        """Make a checkpoint again of the folder that a copy of the run made of the link.

        Raises:
            RunError: it is damaged, and the only one.
        """
        copy = self.folder / "checkpoint"
        if copy.is_symlink() or not copy.is_dir():
            return
        self._all.mkdir(exist_ok=True)
        damage = find_damage(copy)
        if damage is None and not (known := self.at(load_state(copy)["step"])).is_dir():
            os.replace(copy, known)
            return
        if damage is not None and not self._steps():
            raise RunError(f"{copy} is not whole: {damage}; give another --output")
        left = self._all / ("copy" + _PARTIAL)
        os.replace(copy, left)
        shutil.rmtree(left)

    def _link(self, target: Path) -> None:
        link, fresh = self.folder / "checkpoint", self.folder / ("checkpoint" + _PARTIAL)
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target.relative_to(self.folder), target_is_directory=True)
        os.replace(fresh, link)
        _sync(self.folder)


class Claim:
    """Keeps other processes out of a run's folder until it is let go, or this process ends.

    Two that train the same run at a time, as when one is started again before it has ended,
    would take each other's half-written checkpoints away.

    Raises:
        RunError: another process has it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Not flock: processes that make batches would inherit it, and outlive this one.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            self.let_go()
            raise RunError(
                f"another process trains the run in {folder}; end it first, or wait for its end"
            ) from error

    def let_go(self) -> None:
        """Let others in."""
        os.close(self._descriptor)


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, by the name of its folder."""
    return int(checkpoint.name.removeprefix("step-"))


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The state that was saved with a checkpoint.

    Raises:
        RunError: there is none, or it is damaged.
    """
    file = checkpoint / _STATE
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises several unrelated types
        raise RunError(f"{file} cannot be read: {error}") from error
    return state


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files; None where they are those that were written."""
    try:
        hashes: dict[str, str] = json.loads((checkpoint / _HASHES).read_bytes())
        for name, expected in hashes.items():
            if _sha256(checkpoint / name) != expected:
                return f"{name} has changed since it was written"
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return None if _STATE in hashes else f"{_HASHES} does not name {_STATE}"


def _put_aside(folder: Path) -> None:
    aside = folder.with_name(folder.name + _DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)


def _seal(folder: Path) -> None:
    """Put all that was written on the disk, with its hashes."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    hashes = {file.name: _sha256(file) for file in files}
    (folder / _HASHES).write_text(json.dumps(hashes, indent=2) + "\n")
    for file in (*files, folder / _HASHES, folder):
        _sync(file)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """An error in one line: the system's own, where one lies behind what torch says of it."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror
        behind = behind.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
