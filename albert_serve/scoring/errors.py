"""Errors that end a job. Their exit statuses tell a scheduler whether to repeat the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from albert_serve.errors import AlbertServeError

# A shell reports this status for a program that SIGTERM terminated.
_TERMINATED: Final = 128 + 15


class JobError(AlbertServeError):
    """The job ended before its last row."""

    error_type = "job"


class TooManyErrorsError(JobError):
    """More rows failed than the job allows."""

    exit_status = 3


class ChangedJobError(JobError):
    """The input, the model or an option changed since the parts were written."""

    exit_status = 4


class LockedOutputError(JobError):
    """Another job writes to the output."""

    exit_status = 5


class OutputError(JobError):
    """The output cannot be written, for example because the disk is full."""

    exit_status = 7


class StoppedError(JobError):
    """The job received SIGTERM and ended after the current part."""

    exit_status = _TERMINATED


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of the file system to errors that name the output."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}.") from error
