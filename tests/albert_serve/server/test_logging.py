"""The log: nothing waits for who reads it, and no terminal obeys it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from albert_serve.server import logging as our_logging
from albert_serve.server.logging import LogWriter
from tests.albert_serve.support import running_service, service_environment, workers_of

TIMEOUT_S = 20.0
LINE = "a" * 99 + "\n"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LogWriter, int]]:
    """A writer into a pipe, which is our logger's, too, and the pipe's other end."""
    monkeypatch.setattr(our_logging, "_MAX_WAITING_CHARS", 10_000)
    reading, writing = os.pipe()
    writer = LogWriter(writing)
    handler = logging.StreamHandler(writer)
    logger = logging.getLogger(our_logging.__name__)
    logger.addHandler(handler)
    yield writer, reading
    logger.removeHandler(handler)
    os.close(writing)
    os.close(reading)


def test_lines_that_nobody_reads_are_dropped_and_counted(log: tuple[LogWriter, int]) -> None:
    writer, reading = log
    started_s = time.monotonic()
    for _ in range(5000):
        writer.write(LINE)
    writer.finish()
    assert time.monotonic() - started_s < TIMEOUT_S  # it has returned
    text = ""
    while "dropped" not in text:
        text += os.read(reading, 1 << 20).decode()
    *lines, notice = text.splitlines(keepends=True)
    assert lines == [LINE] * len(lines)
    assert notice == f"{5000 - len(lines)} log lines were dropped, as nothing took them\n"
    writer.write("then\n")
    assert os.read(reading, 1 << 20) == b"then\n"


def test_a_full_disk_stops_nobody() -> None:
    with open("/dev/full", "wb") as full:
        writer = LogWriter(full.fileno())
        writer.write(LINE)
        writer.finish()


def test_control_characters_are_escaped(log: tuple[LogWriter, int]) -> None:
    writer, reading = log
    writer.write("a\x1b]0;title\x07 \x9b2J\tb\n")
    assert os.read(reading, 1 << 20) == b"a\\x1b]0;title\\x07 \\x9b2J\tb\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.extended)]
)
def test_a_log_that_nobody_reads_stops_neither_answers_nor_the_end(
    number: signal.Signals, bundle_dir: Path, tmp_path: Path
) -> None:
    """After SIGKILL of the supervisor, too, its worker ends and frees the port."""
    os.mkfifo(tmp_path / "log.txt")
    reading = os.open(tmp_path / "log.txt", os.O_RDONLY | os.O_NONBLOCK)
    environment = service_environment(bundle_dir, tmp_path / "home")
    with running_service(environment, tmp_path) as service:
        for _ in range(50):  # each is a line of 4 kB, and a pipe holds 64
            assert httpx.get(f"{service.url}/{'a' * 4000}", timeout=TIMEOUT_S).status_code == 404
        workers = [psutil.Process(pid) for pid in workers_of(service)]
        service.process.send_signal(number)
        service.process.wait(timeout=TIMEOUT_S)
        _, alive = psutil.wait_procs(workers, timeout=TIMEOUT_S)
        assert not alive
    port = urlsplit(service.url).port
    assert port
    socket.create_server(("127.0.0.1", port)).close()
    os.close(reading)
