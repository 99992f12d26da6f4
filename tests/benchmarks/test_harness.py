"""Processes, load, and pages, which the benchmarks share."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.load import http_request, load
from benchmarks.harness.plan import ClosedLoop, LoadPattern, OpenLoop, Passes, Plan, RandomArrivals
from benchmarks.harness.replies import NO_REPLY, LoadResult, Reply
from benchmarks.harness.subprocess_call import run_in_process, running_in_process

# --- a process of its own -----------------------------------------------------------------------


def test_printed_text_is_not_the_functions_result(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_in_process(print, "anything") is None
    assert not capfd.readouterr().out
    assert run_in_process(math.sqrt, 4.0) == 2.0


def test_this_process_goes_on_meanwhile() -> None:
    with running_in_process(time.sleep, 0.2) as result:
        began = time.monotonic()
        assert result() is None
        assert time.monotonic() - began > 0.1


def test_a_function_that_fails_says_why() -> None:
    with pytest.raises(BenchmarkError, match=r"math ended with status 1: ValueError: "):
        run_in_process(math.sqrt, -1.0)
    with pytest.raises(BenchmarkError, match="ended with status 3: it printed nothing"):
        run_in_process(sys.exit, 3)


# --- load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", [Passes(num_connections=1), OpenLoop(rate_per_s=100, duration_s=0.1)]
)
def test_requests_are_sent_in_turns(pattern: LoadPattern, refusing_port: int) -> None:
    requests = [http_request(f"/{name}", {}) for name in "abcd"]
    result = load(Plan(port=refusing_port, requests=requests, pattern=pattern))
    num_replies = 4 if isinstance(pattern, Passes) else 10
    assert len(result.replies) == num_replies
    assert result.num(200) == num_replies // 2


def test_a_service_that_is_not_there_is_a_failure_each_time() -> None:
    pattern = ClosedLoop(num_connections=2, duration_s=0.3)
    plan = Plan(port=1, requests=[http_request("/x")], pattern=pattern)
    result = load(plan)
    assert set(result.statuses) == {NO_REPLY}
    assert result.num_others == len(result.replies) > 1


def test_a_refusal_without_a_time_is_counted() -> None:
    replies = [
        Reply(due_s=0, latency_s=0.1, status=429, retry_after=text)
        for text in ("1", "60", None, "", "0", "1.5", "soon")
    ]
    assert LoadResult(replies=replies).num_bad_refusals == 5


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
    "pattern", [Passes(num_connections=1), RandomArrivals(rate_per_s=200, num_connections=1)]
)
def test_failed_requests_are_counted_and_described(
    pattern: LoadPattern, refusing_port: int
) -> None:
    requests = [http_request("/fill-mask", {})] * 10
    result = load(Plan(port=refusing_port, requests=requests, pattern=pattern))
    assert result.statuses == {200: 5, 503: 5}
    assert (result.num_failed, len(result.latencies_s())) == (5, 5)
    assert result.failures == ["/fill-mask: 503 {}"] * 3
    assert result.bodies == dict.fromkeys(range(1, 10, 2), b"{}")


def test_random_arrivals_have_the_requested_rate(refusing_port: int) -> None:
    pattern = RandomArrivals(rate_per_s=100)
    requests = [http_request("/x", {})] * 40
    result = load(Plan(port=refusing_port, requests=requests, pattern=pattern))
    assert result.seconds > 40 / 100 / 2  # whoever sends all at once takes no time
    assert list(pattern.times_s(40)) == list(pattern.times_s(40))


def test_passes_are_whole() -> None:
    turns = list(Passes(num_connections=1, least_s=0.01).turns(7))
    assert turns == list(range(7)) * (len(turns) // 7)
    assert len(turns) > 7
