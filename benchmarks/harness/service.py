"""A service as a process on this machine."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.harness.process import BenchmarkError, last_line

HOST: Final = "127.0.0.1"
_START_S: Final = 180.0
_END_S: Final = 90.0


@contextlib.contextmanager
def running_service(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[int]:
    """Start a service, wait until it is ready, and stop it afterwards.

    Args:
        command: arguments of Python; the host and a free port are added.
        folder: its working directory, which also gets its log.
        environment: all of its variables.

    Yields:
        The port.

    Raises:
        BenchmarkError: it did not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, log_file = _free_port(), folder / "service.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--host", HOST, "--port", str(port)],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(process, port, log_file)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
    give_up_s = time.monotonic() + _START_S
    while not _is_ready(port):
        if process.poll() is not None:
            line = last_line(log_file)
            raise BenchmarkError(f"the service did not start: {line} (see {log_file})")
        if time.monotonic() > give_up_s:
            raise BenchmarkError(
                f"the service was not ready within {_START_S:.0f} s (see {log_file})"
            )
        time.sleep(0.1)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/readyz", timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port
