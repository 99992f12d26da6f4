"""A service as a process on this machine."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.harness.process import BenchmarkError, last_line

HOST: Final = "127.0.0.1"
_START_S: Final = 180.0
_END_S: Final = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceProcess:
    """A running service.

    Attributes:
        process: the one that was started; it may have others.
    """

    process: subprocess.Popen[bytes]
    port: int
    log_file: Path

    @property
    def url(self) -> str:
        """The address, without a path."""
        return f"http://{HOST}:{self.port}"

    @property
    def log(self) -> str:
        """Everything that it has logged so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body, or 0 where there is no answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as reply:  # noqa: S310
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def wait_until_ready(self) -> None:
        """Wait for /readyz to answer 200.

        Raises:
            BenchmarkError: the process ended, or took too long.
        """
        give_up_s = time.monotonic() + _START_S
        while self.get("/readyz")[0] != 200:
            if self.process.poll() is not None:
                line = last_line(self.log_file)
                raise BenchmarkError(f"the service did not start: {line} (see {self.log_file})")
            if time.monotonic() > give_up_s:
                raise BenchmarkError(
                    f"the service was not ready within {_START_S:.0f} s (see {self.log_file})"
                )
            time.sleep(0.1)

    def stop(self) -> None:
        """Send SIGTERM, and wait for the end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running_service(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[ServiceProcess]:
    """Start a service, wait until it is ready, and stop it afterwards.

    Args:
        command: arguments of Python; the host and a free port are added.
        folder: its working directory, which also gets its log.
        environment: all of its variables.

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
    service = ServiceProcess(process=process, port=port, log_file=log_file)
    try:
        service.wait_until_ready()
        yield service
    finally:
        service.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port
