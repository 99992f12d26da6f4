"""The parts of a job on disk: complete files, a manifest of what they come from, and a lock.

    _manifest.json   the job: hashes of its input, the model, the parameters
    _parts.jsonl     a line for each complete part: file, size, counts
    part-000000.csv  the parts
    _SUCCESS         the last part is written; where the parts themselves are the output

A part is complete when its line is written; whatever else a killed job left is written again.
Readers of tables (pyarrow, Spark) pass over files that begin with `_` or a dot.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import filelock

from albert_serve.errors import InvalidInputError
from albert_serve.files import put_in_place, sync, write_atomically
from albert_serve.scoring.errors import ChangedJobError, LockedOutputError, writing

MANIFEST_FILE: Final = "_manifest.json"
_LOG_FILE: Final = "_parts.jsonl"
_LOCK_FILE: Final = "_lock"
_SUCCESS_FILE: Final = "_SUCCESS"
_FORMAT_VERSION: Final = 2
# What a changed job is told of each entry of the manifest.
_NAMES: Final = {"inputs": "the input", "model": "the model", "version": "albert-serve's version"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _PartEntry:
    """A complete part, as its line says."""

    file: str
    size: int
    counts: dict[str, Any] = field(default_factory=dict)


class PartFolder:
    """The folder of a job's parts, locked; `PartFolder.open` makes it.

    Attributes:
        entries: the complete parts, in order.
    """

    def __init__(self, folder: Path, entries: list[_PartEntry]) -> None:
        self.folder = folder
        self.entries = entries

    @classmethod
    @contextmanager
    def open(
        cls,
        folder: Path,
        job: Mapping[str, Any],
        *,
        restart: bool,
        is_temporary: bool,
    ) -> Iterator[PartFolder]:
        """Lock a folder, and find the parts that are complete.

        Args:
            job: what the parts depend on, as JSON.
            restart: whether the parts that there are, are removed.
            is_temporary: whether a folder without complete parts is removed, also if there was one
                before.

        Raises:
            LockedOutputError: another job writes to it.
            ChangedJobError: its parts are of another job.
            InvalidInputError: the folder holds something else.
            OutputError: it cannot be written to.
        """
        is_new = not folder.exists()
        _check_ours(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / _LOCK_FILE)
        with writing(folder):
            _acquire(lock, folder)
        parts = cls(folder, [])
        try:
            with writing(folder):
                parts._begin(job, restart=restart)
            is_new = is_new or is_temporary
            yield parts
        finally:
            is_finished = (folder / _SUCCESS_FILE).exists()
            if is_new and not is_finished and not parts.entries:
                _remove(folder)
            lock.release()

    @property
    def files(self) -> list[Path]:
        """The files of the complete parts, in order."""
        return [self.folder / entry.file for entry in self.entries]

    def write(
        self, suffix: str, counts: Mapping[str, Any], content: Callable[[BinaryIO], None]
    ) -> None:
        """Write the next part.

        Raises:
            OutputError: it cannot be written; the part is not complete.
        """
        file = self.folder / f"part-{len(self.entries):06}{suffix}"
        with writing(self.folder):
            partial = self.folder / f".{file.name}.partial"
            with partial.open("wb") as stream:
                content(stream)
            put_in_place(partial, file)
            sync(self.folder)
            entry = _PartEntry(file=file.name, size=file.stat().st_size, counts=dict(counts))
            self._append(entry)
        self.entries.append(entry)

    def join(self, output: Path, content: Callable[[BinaryIO], None]) -> None:
        """Write the whole output, which takes its place when it is complete; remove the parts.

        Raises:
            OutputError: it cannot be written; the parts stay.
        """
        partial = self.folder / ".joined.partial"
        with writing(output):
            with partial.open("wb") as stream:
                content(stream)
            put_in_place(partial, output)
            sync(output.parent)
        _remove(self.folder)

    def finish(self) -> None:
        """Mark a complete folder, and remove what it has no more use for.

        Raises:
            OutputError: it cannot be written to.
        """
        with writing(self.folder):
            write_atomically(self.folder / _SUCCESS_FILE, b"")
        with contextlib.suppress(OSError):
            (self.folder / _LOCK_FILE).unlink(missing_ok=True)

    def _begin(self, job: Mapping[str, Any], *, restart: bool) -> None:
        manifest = self.folder / MANIFEST_FILE
        known = _read_json(manifest)
        current = {"format_version": _FORMAT_VERSION, "job": json.loads(json.dumps(job))}
        if known is not None and not restart:
            _check_unchanged(self.folder, known, current)
            self.entries = self._complete_parts()
            return
        left = [self.folder / name for name in (_SUCCESS_FILE, _LOG_FILE)]
        for file in [*left, *self.folder.glob("part-*")]:
            file.unlink(missing_ok=True)
        write_atomically(manifest, json.dumps(current, indent=1).encode() + b"\n")
        sync(self.folder)

    def _complete_parts(self) -> list[_PartEntry]:
        """Return the parts that are as their lines say, and cut the log after them."""
        log = self.folder / _LOG_FILE
        entries: list[_PartEntry] = []
        num_bytes = 0
        for line in log.read_bytes().splitlines(keepends=True) if log.exists() else []:
            entry = _parse(line)
            if entry is None or not self._is_whole(entry):
                break
            entries.append(entry)
            num_bytes += len(line)
        if not log.exists() or num_bytes < log.stat().st_size:
            (self.folder / _SUCCESS_FILE).unlink(missing_ok=True)
            sync(self.folder)
        if log.exists():
            os.truncate(log, num_bytes)
        return entries

    def _is_whole(self, entry: _PartEntry) -> bool:
        file = self.folder / entry.file
        try:
            return file.stat().st_size == entry.size
        except OSError:
            return False

    def _append(self, entry: _PartEntry) -> None:
        with (self.folder / _LOG_FILE).open("ab") as log:
            log.write(json.dumps(asdict(entry)).encode() + b"\n")
            log.flush()
            os.fsync(log.fileno())


def _acquire(lock: filelock.BaseFileLock, folder: Path) -> None:
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise LockedOutputError(f"another job writes to {folder}; wait until it ends") from error


def _remove(folder: Path) -> None:
    """Remove a folder so that, if it is killed at it, the rest is still a job's folder."""
    last = (MANIFEST_FILE, _LOCK_FILE)
    with contextlib.suppress(OSError):
        names = {file.name for file in folder.iterdir()}
        for name in (*(names - set(last)), *last):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _check_ours(folder: Path) -> None:
    if not folder.is_symlink() and not folder.exists():
        return
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else {""}
    is_ours = MANIFEST_FILE in names or names <= {_LOCK_FILE, f"{MANIFEST_FILE}.partial"}
    if folder.is_symlink() or not is_ours:
        raise InvalidInputError(
            f"{folder} is not the folder of a job's parts; remove it, or name another output"
        )


def _check_unchanged(folder: Path, known: Any, current: dict[str, Any]) -> None:
    before = known.get("job") if isinstance(known, dict) else None
    if not isinstance(before, dict) or known.get("format_version") != _FORMAT_VERSION:
        raise ChangedJobError(f"{folder / MANIFEST_FILE} is of another version; --restart it")
    job = current["job"]
    changed = [name for name in {**before, **job} if before.get(name) != job.get(name)]
    if changed:
        what = " and ".join(_NAMES.get(name, name) for name in changed)
        verb = "are" if len(changed) > 1 else "is"
        raise ChangedJobError(
            f"{what} {verb} not what the parts in {folder} were made with; --restart begins again, "
            "or name another output"
        )


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def _parse(line: bytes) -> _PartEntry | None:
    try:
        return _PartEntry(**json.loads(line)) if line.endswith(b"\n") else None
    except (ValueError, TypeError):
        return None
