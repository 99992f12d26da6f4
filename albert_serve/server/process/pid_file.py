"""The PID file of a service: a process holds it, locked, until it ends; a reload reads it.

The file stays when the process has ended: whether it is held tells whether there is a service.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import IO, Final

import psutil

from albert_serve.errors import ConfigError

# The longest content that is a PID.
_MAX_CHARS: Final = 20
_held: Final[list[IO[str]]] = []  # until the process ends


def hold_pid_file(file: Path) -> None:
    """Write this process' PID; the file is locked until the process ends.

    Raises:
        ConfigError: another process holds the file, or it cannot be written.
    """
    stream = _open_locked(file)
    stream.truncate()
    stream.write(f"{os.getpid()}\n")
    stream.flush()
    _held.append(stream)


def check_pid_file(file: Path) -> None:
    """See that `hold_pid_file` would succeed.

    Raises:
        ConfigError: another process holds the file, or it cannot be written.
    """
    _open_locked(file).close()


def reload_service(file: Path) -> int:
    """Send SIGHUP to the process that holds a PID file.

    Returns:
        Its PID.

    Raises:
        ConfigError: no process of this machine or container holds the file.
        OSError: the process may not be signalled.
    """
    try:
        with file.open() as stream:
            content = stream.read(_MAX_CHARS).strip()
    except OSError as error:
        raise ConfigError(
            f"no service with the PID file {file} was found: {error.strerror}; name the service "
            "with --port or --pid-file"
        ) from error
    if not content.isdecimal() or not _has_open(int(content), file):
        raise ConfigError(f"no running service holds the PID file {file}")
    os.kill(int(content), signal.SIGHUP)
    return int(content)


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


def _lock(stream: IO[str]) -> bool:
    """Whether a file could be locked: no other process holds it."""
    import fcntl  # not on Windows, where the other commands run

    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_open(pid: int, file: Path) -> bool:
    """Whether a process has a file open.

    The lock alone does not tell whose it is: the PID may be of a process in another container that
    has the same folder, or of one that has ended, while another service starts.
    """
    try:
        opened = [Path(one.path) for one in psutil.Process(pid).open_files()]
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied as error:
        raise PermissionError(f"process {pid} may not be signalled by this user") from error
    return any(path.exists() and path.samefile(file) for path in opened)
