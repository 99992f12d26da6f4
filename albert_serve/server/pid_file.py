"""The PID file of a service: a process holds it, locked, until it ends; a reload reads it."""

from __future__ import annotations

import atexit
import os
import signal
from pathlib import Path
from typing import IO, Any, Final

from albert_serve.errors import ConfigError

# The longest content that is a PID.
_MAX_CHARS: Final = 20


def hold_pid_file(file: Path) -> None:
    """Write this process' PID; the file is locked until the process ends, and then removed.

    Raises:
        ConfigError: another process holds the file, or it cannot be written.
    """
    stream = _open_locked(file)
    stream.truncate()
    stream.write(f"{os.getpid()}\n")
    stream.flush()
    atexit.register(_release, file, stream)


def check_pid_file(file: Path) -> None:
    """See that `hold_pid_file` would succeed.

    Raises:
        ConfigError: another process holds the file, or it cannot be written.
    """
    _open_locked(file).close()


def _open_locked(file: Path) -> IO[str]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        if _lock(stream):
            return stream
        with stream:
            pid = stream.read(_MAX_CHARS).strip()
    except OSError as error:
        raise ConfigError(f"the PID file {file} cannot be written: {error.strerror}") from error
    raise ConfigError(f"{file} is the PID file of process {pid}, which runs; name another file")


def reload_service(file: Path) -> int:
    """Send SIGHUP to the process that holds a PID file.

    Returns:
        Its PID.

    Raises:
        ConfigError: no running process holds the file.
        OSError: the process may not be signalled.
    """
    try:
        with file.open("r+") as stream:
            has_ended = _lock(stream)
            content = stream.read(_MAX_CHARS).strip()
    except OSError as error:
        raise ConfigError(
            f"no service with the PID file {file} was found: {error.strerror}; name the service "
            "with --port or --pid-file"
        ) from error
    if has_ended or not content.isdecimal():
        raise ConfigError(f"no running service holds the PID file {file}")
    os.kill(int(content), signal.SIGHUP)
    return int(content)


def _lock(stream: IO[Any]) -> bool:
    """Whether a file could be locked: no other process holds it."""
    import fcntl  # not on Windows, where the other commands run

    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(file: Path, stream: IO[Any]) -> None:
    file.unlink(missing_ok=True)
    stream.close()
