"""`albert-serve reload`: a signal to the service that listens on a port of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil

from albert_serve.errors import ConfigError
from albert_serve.settings import SUPERVISOR_VARIABLE


def reload_service(port: int) -> int:
    """Send SIGHUP to the supervisor of the service that listens on a port.

    Returns:
        The PID of the supervisor.

    Raises:
        ConfigError: no service that this user may signal listens there.
    """
    for worker in _listeners(port):
        with contextlib.suppress(psutil.Error):
            supervisor = worker.environ().get(SUPERVISOR_VARIABLE, "")
            if supervisor == str(worker.ppid()):
                os.kill(int(supervisor), signal.SIGHUP)
                return int(supervisor)
    raise ConfigError(
        f"no albert-serve service of this user listens on port {port}. Name its port with --port, "
        "or run `kill -HUP PID` with the PID that the service printed."
    )


def _listeners(port: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # of another user, or just ended
            connections = process.net_connections("tcp")
            if any(
                part.status == psutil.CONN_LISTEN and part.laddr[1] == port for part in connections
            ):
                yield process
