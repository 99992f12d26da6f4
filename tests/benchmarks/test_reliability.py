"""Load and the scenarios of reliability, against small services and a real one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from benchmarks import examples, sizes
from benchmarks.harness.load import (
    NO_REPLY,
    ClosedLoop,
    LoadPattern,
    LoadPlan,
    LoadResult,
    OpenLoop,
    Reply,
    http_request,
    load,
)
from benchmarks.harness.process import BenchmarkError, run_in_process
from benchmarks.reliability import (
    ScenarioSettings,
    growth,
    main,
    mixed_requests,
    scenario_table,
    serving,
    sigterm,
)


def test_a_process_that_fails_says_why() -> None:
    assert run_in_process(math.sqrt, 4.0) == 2.0
    with pytest.raises(BenchmarkError, match=r"math ended with status 1: ValueError: "):
        run_in_process(math.sqrt, -1.0)


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


@pytest.mark.parametrize(
    ("pattern", "num_sent"),
    [
        (ClosedLoop(num_connections=1, in_passes=True), 4),
        (OpenLoop(rate_per_s=100, duration_s=0.1, num_connections=1), 10),
        (OpenLoop(rate_per_s=100, num_connections=1), 4),
    ],
)
def test_requests_are_sent_in_turns_and_failures_described(
    pattern: LoadPattern, num_sent: int, refusing_port: int
) -> None:
    requests = [http_request(f"/{name}", {}) for name in "abcd"]
    result = load(LoadPlan(port=refusing_port, requests=requests, pattern=pattern))
    assert result.statuses == {200: num_sent // 2, 503: num_sent // 2}
    assert result.failures[0] == "503 {}"
    assert result.bodies == {1: b"{}", 3: b"{}"}
    assert len(result.latencies_s()) == num_sent // 2


def test_what_is_no_good_reply_is_counted() -> None:
    plan = LoadPlan(
        port=1,
        requests=[http_request("/x")],
        pattern=ClosedLoop(num_connections=2, duration_s=0.3),
    )
    result = load(plan)
    assert set(result.statuses) == {NO_REPLY}
    assert result.num_others == len(result.replies) > 1
    replies = [
        Reply(due_s=0, latency_s=0.1, status=429, retry_after=text)
        for text in ("1", "60", None, "", "0", "1.5", "soon")
    ]
    assert LoadResult(replies=replies).num_bad_refusals == 5


def test_too_much_is_refused_and_nothing_is_lost_at_the_end(
    bundle_dir: Path, tmp_path: Path
) -> None:
    with serving(bundle_dir, tmp_path, {"THREADS": "1"}) as service:
        pattern = OpenLoop(rate_per_s=1000, duration_s=3, num_connections=500)
        plan = LoadPlan(port=service.port, requests=mixed_requests(), pattern=pattern)
        result = load(plan)
    assert result.num_others == 0, result.counts
    assert result.num_bad_refusals == 0
    assert result.num(200) > 0
    ended = sigterm(ScenarioSettings(bundle=bundle_dir, folder=tmp_path, seconds=6, times=10))
    assert all(ended.checks.values()), ended
    assert "| sigterm | nothing is lost | yes | replies: " in scenario_table({"sigterm": ended})


def test_growth_is_that_of_medians_and_leaves_the_start_out() -> None:
    assert growth([1.0] * 10 + [100.0] * 80 + [106.0] * 10) == pytest.approx(0.06)
    assert growth([100.0] * 99 + [900.0]) == 0


def test_an_unknown_scenario_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["overlode"])
    assert "there are overload" in capsys.readouterr().err


def test_sizes_and_examples_are_tables_of_bundles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["--sizes", "base", "--precisions", "fp32", "--processes", "1"]
    assert sizes.main([*what, "--output", str(tmp_path)]) == 0
    assert "| base | fp32 | 47.3 | 1.000 |" in capsys.readouterr().out
    assert examples.main([]) == 0
    assert "| fill-mask | Paris is the capital of [MASK]. |" in capsys.readouterr().out
