"""Both services are asked the same and answer alike, and the tables tell of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import pytest

from benchmarks.harness.process import BenchmarkError, Worker
from benchmarks.serve.__main__ import main
from benchmarks.serve.load import LoadPlan, LoadResult, load, post_request
from benchmarks.serve.services import our_service
from benchmarks.serve.tables import ServedResult


def fail(connection: Connection, message: str) -> None:
    """Be a process that fails."""
    raise ValueError(message)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    worker = Worker("it", fail, "no model", log=tmp_path / "log", environment={})
    with (
        worker,
        pytest.raises(BenchmarkError, match="status 1: ValueError: no model"),
    ):
        worker.receive()


class Refusing(BaseHTTPRequestHandler):
    """Answers every other request with 503."""

    protocol_version = "HTTP/1.1"
    count = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Refusing.count += 1
        self.send_response(503 if Refusing.count % 2 else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing_port() -> Iterator[int]:
    Refusing.count = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_requests_are_sent_in_turns_and_failures_described(refusing_port: int) -> None:
    requests = [post_request(f"/{name}", {}) for name in "abcd"]
    result = load(LoadPlan(port=refusing_port, requests=requests, num_connections=1))
    assert result.failures == ["503 {}"] * 2
    assert result.bodies == {1: b"{}", 3: b"{}"}
    assert len(result.latencies_s) == 2


def test_both_services_are_measured_and_answer_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["--preset", "small", "--num-requests", "12", "--levels", "2", "--precisions", "fp32"]
    short = ["--rounds", "1", "--level-time", "0.5", "--threads", "1"]
    assert main([*what, *short, "--output", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    peer, ours = content["results"]
    assert ours["service"]["name"] == "ours fp32"
    for one in (peer, ours):
        for run in one["levels"]["2"]:
            assert not run["failures"]
            assert len(run["latencies_s"]) % 12 == 0  # whole passes
    tables = capsys.readouterr().out
    assert "nan" not in tables
    for start in ("| 2 | ", "| BentoML over pipelines |"):
        assert f"\n{start}" in tables
    (row,) = [line for line in tables.splitlines() if line.startswith("| **ours fp32** |")]
    assert float(row.split(" | ")[5]) < 1e-5


def make_result(rows: dict[int, tuple[float, float]]) -> ServedResult:
    def run(rate: float, latency_s: float) -> LoadResult:
        return LoadResult(seconds=100 / rate, latencies_s=[latency_s] * 100)

    service = our_service("any", Path("any"), 1)
    return ServedResult(service=service, levels={level: [run(*row)] for level, row in rows.items()})


def test_the_peer_counts_where_more_connections_only_wait() -> None:
    result = make_result({1: (5.0, 0.2), 4: (9.7, 0.4), 8: (9.9, 0.8), 64: (10.0, 6.4)})
    assert result.saturation() == 4


def test_ours_counts_with_the_best_level_that_is_no_slower() -> None:
    result = make_result({1: (8.0, 0.1), 4: (20.0, 0.2), 8: (30.0, 0.3)})
    assert result.best_within(0.25) == 4
    assert result.best_within(0.05) is None
