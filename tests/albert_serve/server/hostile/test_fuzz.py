"""Thousands of hostile requests to a real process: none breaks it, hangs it, or learns secrets.

`make fuzz` sends 20,000. A failure prints the seed, the number and the bytes; with both,
`hostile_request(seed, number)` makes them again.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import io
import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tqdm import tqdm

from albert_serve.api.embeddings import OpenAIErrorReply
from albert_serve.api.examples import EXAMPLES
from albert_serve.api.schemas import ErrorReply
from tests.albert_serve.server.hostile.fuzz_requests import Hostile, hostile_request
from tests.albert_serve.support import ROOT, Running, running_service, service_environment

SEED = 20_260_101
NUM_THREADS = 8
# After this without a reply a request hangs; they take milliseconds.
HANG_S = 10.0
# For what broken HTTP waits for before it is told that nothing more comes.
PATIENCE_S = 0.2
PART = 500
# Of what the processes hold. It grows until each thread has had its largest request; from half of
# the way on, a leak of 5 kB a request would be past it.
MAX_GROWTH_BYTES = 250 << 20
MAX_LATE_GROWTH_BYTES = 50 << 20
NO_REPLY = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Got:
    """A reply as it came."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


@pytest.fixture(scope="module")
def fuzzed(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("fuzz-home")
    with running_service(service_environment(bundle_dir, home), home) as started:
        yield started


@pytest.mark.parametrize(
    "num_requests",
    [
        pytest.param(1_000, id="some"),
        pytest.param(20_000, id="many", marks=pytest.mark.slow),
    ],
)
def test_no_request_breaks_the_service(
    num_requests: int, fuzzed: Running, bundle_dir: Path
) -> None:
    secrets = [
        name.encode()
        for name in (str(ROOT), sys.prefix, str(bundle_dir), str(fuzzed.log_file.parent))
    ]
    secrets += [b"Traceback", b"site-packages", b'File "']
    expected = reference_answers(fuzzed)
    counted: collections.Counter[tuple[str, int]] = collections.Counter()
    held_bytes: list[int] = []
    progress = tqdm(total=num_requests, unit=" requests", disable=None)
    with progress, ThreadPoolExecutor(NUM_THREADS) as threads:
        for first in range(0, num_requests, PART):
            numbers = range(first, min(first + PART, num_requests))
            for counts in threads.map(lambda number: attack(fuzzed, number, secrets), numbers):
                counted.update(counts)
                progress.update()
            assert_alive(fuzzed, expected)
            held_bytes.append(memory_of(fuzzed))
    shown = " ".join(f"{held / 2**20:.0f}" for held in held_bytes)
    sys.stdout.write(f"\nMiB held after every {PART}: {shown}\n{table(counted)}\n")
    assert held_bytes[-1] - held_bytes[0] < MAX_GROWTH_BYTES
    assert held_bytes[-1] - held_bytes[len(held_bytes) // 2] < MAX_LATE_GROWTH_BYTES
    assert "Traceback" not in fuzzed.log, fuzzed.log[fuzzed.log.index("Traceback") - 500 :][:4000]


def attack(running: Running, number: int, secrets: list[bytes]) -> list[tuple[str, int]]:
    """Send a request and hold what comes against the contract."""
    hostile = hostile_request(SEED, number)
    try:
        replies = exchange(running, hostile)
        for reply in replies:
            assert_harmless(reply, secrets)
        if hostile.is_http:
            assert len(replies) == hostile.num_replies, f"{len(replies)} replies"
            for reply in replies:
                assert_contract(reply, hostile)
    except (AssertionError, OSError, ValueError, http.client.HTTPException) as error:
        shown = hostile.data[:3000]
        pytest.fail(
            f"{type(error).__name__}: {error}\nto hostile_request({SEED}, {number}), "
            f"{hostile.kind}, {len(hostile.data)} bytes:\n{shown!r}"
        )
    return [(hostile.kind, reply.status) for reply in replies] or [(hostile.kind, NO_REPLY)]


def exchange(running: Running, hostile: Hostile) -> list[Got]:
    """The replies, over a connection of its own."""
    host, port = httpx.URL(running.url).host, httpx.URL(running.url).port
    with socket.create_connection((host, port), timeout=HANG_S) as connection:
        # The service may refuse, and close, before it has read everything.
        with contextlib.suppress(ConnectionError):
            connection.sendall(hostile.data)
        if not hostile.is_http:
            return read_replies(_Reader(io.BytesIO(read_rest(connection))), hostile)
        reader = _Reader(connection.makefile("rb", buffering=0))
        return [read_reply(reader, hostile) for _ in range(hostile.num_replies)]


class _Reader(io.BufferedReader):
    """A reader that outlives the reply which is read from it, and serves as its socket."""

    def makefile(self, _mode: str) -> _Reader:
        return self

    def close(self) -> None:
        """The connection is closed by whoever opened it."""


def read_reply(reader: _Reader, hostile: Hostile) -> Got:
    response = http.client.HTTPResponse(reader, method=hostile.method)  # type: ignore[arg-type]
    response.begin()
    return Got(status=response.status, headers=response.headers, body=response.read())


def read_replies(reader: _Reader, hostile: Hostile) -> list[Got]:
    replies = []
    while reader.peek(1):
        replies.append(read_reply(reader, hostile))
    return replies


def read_rest(connection: socket.socket) -> bytes:
    """All that comes up to the end of the connection."""
    received = bytearray()
    connection.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionError):
        try:
            _receive(connection, received)
        except TimeoutError:
            connection.settimeout(HANG_S)
            connection.shutdown(socket.SHUT_WR)
            _receive(connection, received)
    return bytes(received)


def _receive(connection: socket.socket, received: bytearray) -> None:
    while part := connection.recv(1 << 16):
        received += part


def assert_harmless(reply: Got, secrets: list[bytes]) -> None:
    assert reply.status < 500, reply
    for secret in secrets:
        assert secret not in reply.body, f"the reply names {secret!r}: {reply.body[:2000]!r}"
        assert secret not in str(reply.headers).encode("utf-8", "replace")
    for name, value in reply.headers.items():
        assert not {"\r", "\n"} & set(value), f"a line's end in {name}"
        assert name.lower() != "set-cookie"


def assert_contract(reply: Got, hostile: Hostile) -> None:
    assert reply.headers["X-Request-ID"]
    if reply.status < 400:
        return
    assert reply.headers["content-type"] == "application/json"
    if hostile.method == "HEAD":
        return
    assert set(json.loads(reply.body)) == {"error", "error_type", "request_id"}
    is_openai = isinstance(json.loads(reply.body)["error"], dict)
    error: Any = (OpenAIErrorReply if is_openai else ErrorReply).model_validate_json(reply.body)
    assert error.error
    assert error.request_id == reply.headers["X-Request-ID"]
    assert len(reply.body) < 8_000, "an error that repeats what it was given"


def reference_answers(running: Running) -> list[Any]:
    with httpx.Client(base_url=running.url, timeout=HANG_S) as client:
        tasks = [task["name"] for task in client.get("/info").json()["tasks"]]
        return [
            client.post(f"/{task}", json=example.body).raise_for_status().json()
            for task in tasks
            for example in EXAMPLES[task]
        ]


def assert_alive(running: Running, expected: list[Any]) -> None:
    assert running.process.poll() is None, running.log[-4000:]
    assert reference_answers(running) == expected


def memory_of(running: Running) -> int:
    """The memory of the service's processes, without pages that are shared with files."""
    first = psutil.Process(running.process.pid)
    held = [one.memory_info() for one in [first, *first.children(recursive=True)]]
    return sum(info.rss - info.shared for info in held)


def table(counted: collections.Counter[tuple[str, int]]) -> str:
    statuses = sorted({status for _, status in counted})
    names = ["-" if status == NO_REPLY else str(status) for status in statuses]
    lines = [f"{'replies':12}" + "".join(f"{name:>8}" for name in names)]
    for kind in [*sorted({kind for kind, _ in counted}), "all"]:
        numbers = [
            sum(n for key, n in counted.items() if key[1] == status and kind in (key[0], "all"))
            for status in statuses
        ]
        lines.append(f"{kind:12}" + "".join(f"{number:8}" for number in numbers))
    return "\n".join(lines)
