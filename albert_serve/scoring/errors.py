"""The errors that end a job, each with an exit status that tells a scheduler what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from albert_serve.errors import AlbertServeError

# A shell reports this status for a program that SIGTERM ended.
_TERMINATED: Final = 128 + 15


class JobError(AlbertServeError):
    """A batch job that ended before its last row."""

    error_type = "job"


class TooManyErrorsError(JobError):
    """More rows are in error than the job allows."""

    exit_status = 3


class ChangedJobError(JobError):
    """The parts of a job that began with another input, model or parameter."""

    exit_status = 4


class LockedOutputError(JobError):
    """Another job writes to the output."""

    exit_status = 5


class OutputError(JobError):
    """The output cannot be written, as on a full disk."""

    exit_status = 7


class StoppedError(JobError):
    """The job was asked to stop, and ended after the part that it was at."""

    exit_status = _TERMINATED


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the output in errors of the file system."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
