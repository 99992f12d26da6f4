"""Checkpoints of a run: written atomically, hashed, and rotated.

`checkpoints/step-00001000/` holds a Hugging Face directory, the training state `state.pt` and
`hashes.json`; `checkpoint` links to the newest, and `best` to that of the best validation, which is
kept however old it is.
"""

from __future__ import annotations

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
from filelock import FileLock, Timeout

from albert_serve.files import partial_path, replace_folder, sha256_of, sync
from training.errors import RunError

_STEP: Final = re.compile(r"step-(\d{8,})")
_HASHES: Final = "hashes.json"
_STATE: Final = "state.pt"
_NEWEST_LINK: Final = "checkpoint"
_BEST_LINK: Final = "best"
# Errors of a failed write: Python's, torch's and safetensors' own.
_UNWRITABLE: Final = (OSError, RuntimeError, safetensors.SafetensorError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """The checkpoints in a run's folder."""

    folder: Path
    num_kept: int

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        state: dict[str, Any],
        *,
        anew: bool = False,
    ) -> None:
        """Write the checkpoint of a step, and remove the oldest ones over `num_kept`.

        Args:
            write: writes the model, its config and the tokenizer into a folder.
            state: the training state, which `load_state` returns.
            anew: replaces the checkpoint of a step that has one, which otherwise stays.
        """
        if anew or not self.at(step).is_dir():
            self._save(step, write, state)
        self._remove_old()

    def _save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        final = self.at(step)
        try:
            with replace_folder(final, mode=0o777) as folder:
                write(folder)
                # A Python stream: its errors carry the system's reason, such as a full disk.
                with (folder / _STATE).open("wb") as stream:
                    torch.save(state, stream)
                hashes = {file.name: sha256_of(file) for file in folder.iterdir() if file.is_file()}
                (folder / _HASHES).write_text(json.dumps(hashes, indent=2) + "\n")
            self._link(_NEWEST_LINK, final)
        except _UNWRITABLE as error:
            reason = str(error).splitlines()[0]
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror
            raise RunError(
                f"the checkpoint of step {step:,} could not be written: {reason}; {self._last()}"
            ) from error

    def _clear_partial(self) -> None:
        """Remove partial checkpoints of a killed process; keep complete ones of missing steps."""
        for partial in sorted(self._all.glob(".step-*"), reverse=True):  # new before old
            final = self._all / partial.name.split(".")[1]
            if not final.exists() and find_damage(partial) is None:
                os.replace(partial, final)
            else:
                shutil.rmtree(partial)

    def newest(self) -> Path | None:
        """Return the newest intact checkpoint; None if the run has no checkpoint.

        Partial checkpoints of a killed process are removed. Damaged ones are reported, and removed
        if an older one is intact.
        """
        self._clear_partial()
        damaged: list[Path] = []
        for folder in self._steps():
            damage = find_damage(folder)
            if damage is None:
                for damaged_folder in damaged:
                    _remove(damaged_folder)
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
        for old in old_steps:
            _remove(old)

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


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Load the training state of a checkpoint."""
    file = checkpoint / _STATE
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises several unrelated types
        raise RunError(f"{file} cannot be read: {error}") from error
    return state


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


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint first, so that a half-removed folder is never taken for one."""
    old = checkpoint.with_name(f".{checkpoint.name}.old")
    os.replace(checkpoint, old)
    shutil.rmtree(old)
