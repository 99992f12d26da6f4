"""The errors that end a job, each with an exit status that tells a scheduler what to do."""

from __future__ import annotations

from typing import Final

from albert_serve.errors import AlbertServeError

# The exit status that a shell has for a program that SIGTERM ended.
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


class ServiceUnavailableError(JobError):
    """The service that answers was out of reach or overloaded for too long."""

    exit_status = 6


class OutputError(JobError):
    """The output cannot be written, as on a full disk."""

    exit_status = 7


class StoppedError(JobError):
    """The job was asked to stop, and ended after the part that it was at."""

    exit_status = _TERMINATED


def first_line(error: Exception) -> str:
    """Return the first line of a library's message; the error's type if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
