"""Checkpoints of a run: written atomically, hashed, and rotated.

`checkpoints/step-00001000/` holds a Hugging Face directory, the training state `state.pt`,
`hashes.json`, and `validation.json` if its weights were validated afterwards; `checkpoint` links to
the newest, and `best` to that of the best validation, which is kept however old it is. A damaged
checkpoint is renamed to `step-00001000.damaged` and removed at the next rotation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from filelock import FileLock, Timeout

from albert_serve.files import partial_path, sha256_of, sync, write_atomically
from training.loop.progress import RunError

_STEP: Final = re.compile(r"step-(\d{8,})")
_HASHES: Final = "hashes.json"
_STATE: Final = "state.pt"
_VALIDATION: Final = "validation.json"
# The state that a validation changes, which may follow the checkpoint of its step.
_VALIDATED: Final = ("validated_step", "selection")
_PARTIAL: Final = ".partial"
_DAMAGED: Final = ".damaged"
_NEWEST_LINK: Final = "checkpoint"
_BEST_LINK: Final = "best"
# Errors of a failed write: Python's, torch's and safetensors' own.
_UNWRITABLE: Final = (OSError, RuntimeError, safetensors.SafetensorError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """The checkpoints in a run's folder.

    Attributes:
        num_kept: number of newest checkpoints to keep.

    Raises:
        RunError: an earlier version wrote the run.
    """

    folder: Path
    num_kept: int = 2

    def __post_init__(self) -> None:
        link = self.folder / _NEWEST_LINK
        if link.is_dir() and not link.is_symlink() and not (link / _HASHES).is_file():
            raise RunError(
                f"{link} was written by an earlier version; give another --output, and "
                "--initialize-from to begin with its weights"
            )

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        """Write the checkpoint of a step, and remove the oldest ones over `num_kept`.

        Of a step that has one, only what a validation has changed in the state is written.

        Args:
            write: writes the model, its config and the tokenizer into a folder.
            state: the training state, which `load_state` returns.

        Raises:
            RunError: it cannot be written; earlier checkpoints are unchanged.
        """
        if self.at(step).is_dir():
            _update(self.at(step), state)
        else:
            self._save(step, write, state)
        self._remove_old()

    def _save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        final = self.at(step)
        partial = partial_path(final)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            # A Python stream: its errors carry the system's reason, such as a full disk.
            with (partial / _STATE).open("wb") as stream:
                torch.save(state, stream)
            _seal(partial)
            os.replace(partial, final)
            sync(self._all)
            self._link(_NEWEST_LINK, final)
        except _UNWRITABLE as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RunError(
                f"the checkpoint of step {step:,} could not be written: {_reason(error)}; "
                f"{self._last()}"
            ) from error

    def newest(self) -> Path | None:
        """Return the newest intact checkpoint; None if the run has none at all.

        Partial checkpoints of a killed process are removed. Damaged checkpoints are reported, and
        renamed if an older one is intact.

        Raises:
            RunError: there are checkpoints, and all are damaged.
        """
        for partial in self._all.glob("*" + _PARTIAL):
            shutil.rmtree(partial)
        for name in (_NEWEST_LINK, _BEST_LINK):
            self._adopt_copy(name)
        damaged: list[Path] = []
        for folder in self._steps():
            damage = find_damage(folder)
            if damage is None:
                for damaged_folder in damaged:
                    _set_aside(damaged_folder)
                self._link(_NEWEST_LINK, folder)
                return folder
            print(f"warning: passed over {folder}: {damage}", file=sys.stderr)
            damaged.append(folder)
        if damaged:
            raise RunError(f"no checkpoint in {self._all} is whole; give another --output")
        return None

    def link_best(self, step: int | None) -> None:
        """Link `best` to a step's checkpoint; remove the link if that is lost.

        Without a step, as after training without validation, an earlier best one stays linked.
        """
        link = self.folder / _BEST_LINK
        if step is not None and self.at(step).is_dir():
            self._link(_BEST_LINK, self.at(step))
        elif step is not None or not link.exists():
            link.unlink(missing_ok=True)

    def at(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self._all / f"step-{step:08}"

    @property
    def _all(self) -> Path:
        return self.folder / "checkpoints"

    def _steps(self) -> list[Path]:
        """Return the folders of all checkpoints, the newest first."""
        folders = [path for path in self._all.glob("step-*") if _STEP.fullmatch(path.name)]
        return sorted(folders, key=step_of, reverse=True)

    def _last(self) -> str:
        last = next(iter(self._steps()), None)
        return f"the last one, {last}, is whole" if last else "there is none before it"

    def _remove_old(self) -> None:
        best = (self.folder / _BEST_LINK).resolve()
        old_steps = [
            folder for folder in self._steps()[self.num_kept :] if folder.resolve() != best
        ]
        for old in (*old_steps, *self._all.glob("*" + _DAMAGED)):
            # Renamed first, so that a half-removed folder is never taken for a checkpoint.
            partial = partial_path(old)
            os.replace(old, partial)
            shutil.rmtree(partial)

    def _adopt_copy(self, name: str) -> None:
        """Move a link's target into `checkpoints/` if copying the run turned it into a folder.

        Raises:
            RunError: it is damaged, and the only checkpoint.
        """
        copy = self.folder / name
        if copy.is_symlink() or not copy.is_dir():
            return
        self._all.mkdir(exist_ok=True)
        damage = find_damage(copy)
        if damage is None:
            known = self.at(load_state(copy)["step"])
            if not known.is_dir():
                os.replace(copy, known)
                return
        elif not self._steps():
            raise RunError(f"{copy} is not whole: {damage}; give another --output")
        partial = self._all / (name + _PARTIAL)
        os.replace(copy, partial)
        shutil.rmtree(partial)

    def _link(self, name: str, target: Path) -> None:
        link = self.folder / name
        fresh = partial_path(link)
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target.relative_to(self.folder), target_is_directory=True)
        os.replace(fresh, link)
        sync(self.folder)


def claim(folder: Path) -> FileLock:
    """Lock a run's folder until the lock's `release` or the end of this process.

    Two processes that train the same run, as after an early restart, would remove each other's
    partial checkpoints.

    Raises:
        RunError: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Forked data loader workers, which may outlive this process, do not inherit it.
    lock = FileLock(folder / "run.lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunError(
            f"another process trains the run in {folder}; end it first, or wait for its end"
        ) from error
    except OSError:
        pass  # a file system without locks
    return lock


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint from its folder's name."""
    return int(checkpoint.name.removeprefix("step-"))


def load_state(checkpoint: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Load the training state of a checkpoint.

    What a later validation has changed is left out if it cannot be read; the run then validates the
    step again.

    Args:
        mmap: leave tensors in the file until they are used.

    Raises:
        RunError: it is missing or damaged.
    """
    file = checkpoint / _STATE
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch.load raises several unrelated types
        raise RunError(f"{file} cannot be read: {error}") from error
    return state | _read_validated(checkpoint / _VALIDATION)


def _read_validated(file: Path) -> dict[str, Any]:
    """Return what a validation has changed in the state; nothing if the file is damaged."""
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        print(f"warning: passed over {file}: {error}", file=sys.stderr)
        return {}


def _update(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Write the state that a validation has changed since the checkpoint was written.

    The other files stay: two of them cannot be replaced at once.
    """
    known = load_state(checkpoint, mmap=True)  # for two small values
    validated = {name: state[name] for name in _VALIDATED if name in state}
    if any(known.get(name) != value for name, value in validated.items()):
        write_atomically(checkpoint / _VALIDATION, json.dumps(validated).encode())


def find_damage(checkpoint: Path) -> str | None:
    """Describe the damage to a checkpoint's files; None if they match their hashes."""
    try:
        hashes: dict[str, str] = json.loads((checkpoint / _HASHES).read_bytes())
        for name, expected in hashes.items():
            if sha256_of(checkpoint / name) != expected:
                return f"{name} has changed since it was written"
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return None if _STATE in hashes else f"{_HASHES} does not name {_STATE}"


def _set_aside(folder: Path) -> None:
    target = folder.with_name(folder.name + _DAMAGED)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(folder, target)


def _seal(folder: Path) -> None:
    """Write the hashes of a folder's files, and sync all of them to disk."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    hashes = {file.name: sha256_of(file) for file in files}
    (folder / _HASHES).write_text(json.dumps(hashes, indent=2) + "\n")
    for file in (*files, folder / _HASHES, folder):
        sync(file)


def _reason(error: BaseException) -> str:
    """Return an error in one line: the system's own where its context holds one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
