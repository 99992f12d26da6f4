"""The log: nothing waits for its reader, no terminal obeys it, and it has callers' traces."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from albert_serve.server import logging as our_logging
from albert_serve.server.logging import LogOutput, QueuedHandler
from tests.albert_serve.support import (
    Running,
    running_service,
    served,
    service_environment,
    wait_until_logged,
)

TIMEOUT_S = 20.0
LINE = "a" * 99
NUM_LINES = 5000
NOTICE = re.compile(r"(\d+) log lines were dropped, as nothing took them\n")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[logging.Logger, int]]:
    """A logger that writes into a pipe, and the pipe's other end."""
    monkeypatch.setattr(our_logging, "_MAX_WAITING", 100)
    reading, writing = os.pipe()
    handler = QueuedHandler(LogOutput(writing))
    logger = logging.getLogger(our_logging.__name__)
    logger.addHandler(handler)
    yield logger, reading
    logger.removeHandler(handler)
    os.close(writing)
    os.close(reading)


def test_lines_that_nobody_reads_are_dropped_and_counted(log: tuple[logging.Logger, int]) -> None:
    logger, reading = log
    started_s = time.monotonic()
    for _ in range(NUM_LINES):
        logger.warning(LINE)
    assert time.monotonic() - started_s < TIMEOUT_S  # it has returned
    text, num_lines, num_dropped = "", 0, 0
    while num_lines + num_dropped < NUM_LINES:
        text += os.read(reading, 1 << 20).decode()
        num_lines = text.count(LINE)
        num_dropped = sum(map(int, NOTICE.findall(text)))
    assert num_dropped > 0
    assert NOTICE.sub("", text) == f"{LINE}\n" * num_lines
    logger.warning("then")
    assert os.read(reading, 1 << 20) == b"then\n"


def test_a_full_disk_stops_nobody() -> None:
    with open("/dev/full", "wb") as full:
        output = LogOutput(full.fileno())
        QueuedHandler(output).handle(logging.makeLogRecord({"msg": LINE}))
        output.finish()
        assert output.num_dropped == 1


def test_control_characters_are_escaped(log: tuple[logging.Logger, int]) -> None:
    logger, reading = log
    logger.warning("a\x1b]0;title\x07 \x9b2J\tb")
    assert os.read(reading, 1 << 20) == b"a\\x1b]0;title\\x07 \\x9b2J\tb\n"


def test_a_log_that_nobody_reads_stops_neither_answers_nor_the_end(
    bundle_dir: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "log.txt")
    reading = os.open(tmp_path / "log.txt", os.O_RDONLY | os.O_NONBLOCK)
    with served(bundle_dir, tmp_path) as service:
        for _ in range(50):  # each is a line of 4 kB, and a pipe holds 64
            assert httpx.get(f"{service.url}/{'a' * 4000}", timeout=TIMEOUT_S).status_code == 404
        service.process.terminate()
        service.process.wait(timeout=TIMEOUT_S)
    port = urlsplit(service.url).port
    assert port
    socket.create_server(("127.0.0.1", port)).close()
    os.close(reading)


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
WITH_EXPORTER = """
services:
  albert_serve:
    tracing:
      exporter_type: in_memory
      sample_rate: 1.0
"""


def ask(running: Running, request_id: str, **headers: str) -> None:
    reply = httpx.get(f"{running.url}/info", headers={"X-Request-ID": request_id, **headers})
    assert reply.status_code == 200


def line_of(running: Running, request_id: str) -> dict[str, Any]:
    """The log record of a request, once its reply has been sent."""
    wait_until_logged(running, request_id)
    record: dict[str, Any] = json.loads(
        next(line for line in running.log.splitlines() if request_id in line)
    )
    return record


def test_with_an_exporter_the_log_has_the_callers_trace(bundle_dir: Path, tmp_path: Path) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home")
    environment["ALBERT_SERVE_LOG_FORMAT"] = "json"
    file = tmp_path / "bentoml.yaml"
    file.write_text(WITH_EXPORTER)
    environment["BENTOML_CONFIG"] = str(file)
    with running_service(environment, tmp_path) as running:
        ask(running, "in-a-trace", traceparent=f"00-{TRACE_ID}-00f067aa0ba902b7-01")
        ask(running, "untraced")
        assert line_of(running, "in-a-trace")["trace_id"] == TRACE_ID
        own = line_of(running, "untraced")["trace_id"]
    assert re.fullmatch(r"[0-9a-f]{32}", own)
    assert own != TRACE_ID
