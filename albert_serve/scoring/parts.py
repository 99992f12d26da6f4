"""The parts of a job on disk: complete files, a manifest and a lock.

    _manifest.json   the job: hashes of its input, the model, the parameters
    _parts.jsonl     a line for each complete part: its counts, and the SHA-256 of its file
    part-000000.csv  the parts
    _SUCCESS         marks a complete output, if the output is the folder

A part is complete when its line is written. A resumed job overwrites all other part files. Readers
of tables (pyarrow, Spark) ignore files that begin with `_` or a dot.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO, Final

import filelock
from pydantic import TypeAdapter, ValidationError

from albert_serve.errors import InvalidInputError
from albert_serve.files import put_in_place, sha256_of, sync, write_atomically
from albert_serve.scoring.errors import ChangedJobError, LockedOutputError, writing
from albert_serve.scoring.options import Counts

_MANIFEST_FILE: Final = "_manifest.json"
_LOG_FILE: Final = "_parts.jsonl"
_LOCK_FILE: Final = "_lock"
_SUCCESS_FILE: Final = "_SUCCESS"
_FORMAT_VERSION: Final = 5
_START_OVER: Final = "Use --restart to start over, or choose another output."
_OBJECT: Final = TypeAdapter(dict[str, Any])
_SHA256: Final = "sha256"
_COUNTS: Final = TypeAdapter(Counts)
# Names of manifest entries in messages.
_NAMES: Final = {"inputs": "The input", "model": "The model", "version": "albert-serve's version"}


class PartFolder:
    """The locked folder of a job's parts, which `PartFolder.open` makes.

    Attributes:
        counts: counts of each complete part, in order.
    """

    def __init__(self, folder: Path, suffix: str) -> None:
        self._folder = folder
        self._suffix = suffix
        self.counts: list[dict[str, Any]] = []
        self._hashes: list[str] = []

    @classmethod
    @contextmanager
    def open(
        cls,
        folder: Path,
        suffix: str,
        job: Mapping[str, Any],
        *,
        restart: bool,
        is_temporary: bool,
    ) -> Iterator[PartFolder]:
        """Lock a folder, and find the complete parts.

        Args:
            suffix: suffix of the part files.
            job: JSON description of everything that determines the parts.
            restart: whether existing parts are removed.
            is_temporary: whether the folder is removed at the end if it has no complete part.
        """
        _check_is_job_folder(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        parts = cls(folder, suffix)
        with _locked(folder):
            with writing(folder):
                parts._begin(job, restart=restart)
            try:
                yield parts
            finally:
                if is_temporary and not parts.counts:
                    _remove(folder)

    @property
    def files(self) -> list[Path]:
        """The files of the complete parts, in order."""
        return [self._file(number) for number in range(len(self.counts))]

    def _file(self, number: int) -> Path:
        return self._folder / f"part-{number:06}{self._suffix}"

    def write(self, counts: Mapping[str, Any], content: Callable[[BinaryIO], None]) -> None:
        """Write the next part."""
        file = self._file(len(self.counts))
        with writing(self._folder):
            _write(file, self._folder / ".part.partial", content)
            sha256 = sha256_of(file)
            with (self._folder / _LOG_FILE).open("ab") as log:
                log.write(json.dumps({**counts, _SHA256: sha256}).encode() + b"\n")
                log.flush()
                os.fsync(log.fileno())
        self.counts.append(dict(counts))
        self._hashes.append(sha256)

    def join(self, output: Path, content: Callable[[BinaryIO], None]) -> None:
        """Write the complete output in place of an existing file, and remove the parts."""
        self._check_files()
        with writing(output):
            _write(output, self._folder / ".joined.partial", content)
        _remove(self._folder)

    def finish(self) -> None:
        """Mark the folder as complete, and remove the lock."""
        self._check_files()
        with writing(self._folder):
            write_atomically(self._folder / _SUCCESS_FILE, b"")
        with contextlib.suppress(OSError):
            (self._folder / _LOCK_FILE).unlink(missing_ok=True)

    def _begin(self, job: Mapping[str, Any], *, restart: bool) -> None:
        manifest = self._folder / _MANIFEST_FILE
        current = {"format_version": _FORMAT_VERSION, "job": json.loads(json.dumps(job))}
        if not restart:
            _check_regular(manifest)
            _check_regular(self._folder / _LOG_FILE)
        if manifest.exists() and not restart:
            _check_unchanged(manifest, current)
            self._read_log()
            return
        old_files = [self._folder / name for name in (_SUCCESS_FILE, _LOG_FILE)]
        for file in [*old_files, *self._folder.glob("part-*")]:
            file.unlink(missing_ok=True)
        write_atomically(manifest, json.dumps(current, indent=1).encode() + b"\n")
        sync(self._folder)

    def _read_log(self) -> None:
        """Read the lines of complete parts, and remove an incomplete line of a killed job."""
        log = self._folder / _LOG_FILE
        lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            os.truncate(log, sum(map(len, lines[:-1])))
            lines.pop()
        for number, line in enumerate(lines, start=1):
            try:
                counts, sha256 = _read_line(line)
            except ValueError as error:
                raise _damaged(log, f"line {number} does not have the counts of a part") from error
            self.counts.append(counts)
            self._hashes.append(sha256)
        self._check_files()

    def _check_files(self) -> None:
        """Check that each part is unchanged, and so has all of its rows."""
        for file, sha256 in zip(self.files, self._hashes, strict=True):
            _check_regular(file)
            if not file.exists():
                raise _damaged(file, "it does not exist")
            if sha256_of(file) != sha256:
                raise _damaged(file, f"its SHA-256 differs from that in {_LOG_FILE}")


def _read_line(line: bytes) -> tuple[dict[str, Any], str]:
    """Return the counts of a part and the SHA-256 of its file."""
    values = _OBJECT.validate_json(line)
    sha256 = values.pop(_SHA256, None)
    if not isinstance(sha256, str) or values.keys() != {field.name for field in fields(Counts)}:
        raise ValueError("it has other keys")
    return asdict(_COUNTS.validate_json(json.dumps(values), strict=True)), sha256


def _check_regular(file: Path) -> None:
    if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
        raise _damaged(file, "it is not a regular file")


def _damaged(file: Path, reason: str) -> ChangedJobError:
    return ChangedJobError(f"{file} was damaged: {reason}. {_START_OVER}")


def _write(file: Path, partial: Path, content: Callable[[BinaryIO], None]) -> None:
    """Write a file that replaces an existing one only when it is complete and on disk."""
    with partial.open("wb") as stream:
        content(stream)
    put_in_place(partial, file)
    sync(file.parent)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = filelock.FileLock(folder / _LOCK_FILE)
    with writing(folder):
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout as error:
            message = f"Another job writes to {folder}. Wait until it ends."
            raise LockedOutputError(message) from error
    try:
        yield
    finally:
        lock.release()


def _remove(folder: Path) -> None:
    """Remove a folder, so that a killed process leaves a valid folder of a job without parts."""
    final_names = (_MANIFEST_FILE, _LOCK_FILE)
    with contextlib.suppress(OSError):
        names = {file.name for file in folder.iterdir()}
        for name in (_LOG_FILE, *(names - set(final_names)), *final_names):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _check_is_job_folder(folder: Path) -> None:
    if not folder.is_symlink() and not folder.exists():
        return
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else {""}
    is_job = _MANIFEST_FILE in names or names <= {_LOCK_FILE, f"{_MANIFEST_FILE}.partial"}
    if folder.is_symlink() or not is_job:
        raise InvalidInputError(
            f"{folder} is not the folder of a job's parts. Remove it, or choose another output."
        )


def _check_unchanged(manifest: Path, current: dict[str, Any]) -> None:
    try:
        stored = _OBJECT.validate_json(manifest.read_bytes())
    except ValidationError as error:
        raise _damaged(manifest, "it is not a job's manifest") from error
    if stored.get("format_version") != _FORMAT_VERSION:
        raise ChangedJobError(f"{manifest} has another version. {_START_OVER}")
    previous, job = stored.get("job"), current["job"]
    if not isinstance(previous, dict):
        raise _damaged(manifest, "it is not a job's manifest")
    changed = [name for name in {**previous, **job} if previous.get(name) != job.get(name)]
    if changed:
        names = " and ".join(_NAMES.get(name, name) for name in changed)
        raise ChangedJobError(
            f"{names} changed since the parts in {manifest.parent} were written. {_START_OVER}"
        )
