"""Scoring through a service: the same answers, and waits where it does not answer."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from albert_serve.errors import ConfigError, RequestError, UnauthorizedError
from albert_serve.scoring.errors import ChangedJobError, ServiceUnavailableError
from albert_serve.scoring.job import score_files
from albert_serve.scoring.local import LocalScorer
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.remote import RemoteScorer
from tests.albert_serve.scoring.jobs import labels_of, read_jsonl, write_jsonl
from tests.albert_serve.support import Running, free_port

pytestmark = pytest.mark.process

INFO: dict[str, Any] = {
    "model_id": "m",
    "version": "1",
    "precision": "fp32",
    "revision": "r1",
    "tasks": [{"name": "text-classification"}],
    "max_positions": 128,
    "mask_token": "[MASK]",
    "max_items": 8,
    "max_body_bytes": 1000,
}
Reply = tuple[int, dict[str, str], Any]


class Service:
    """A service on loopback whose replies a test decides."""

    def __init__(self) -> None:
        self.port = free_port()
        self.info = dict(INFO)
        self.num_requests = self.num_running = self.max_running = 0
        self.refusals: list[Reply | None] = []
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            # A connection for each request, so that none outlives the service.
            protocol_version = "HTTP/1.0"

            def do_GET(self) -> None:
                self._reply((200, {}, service.info))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = service.answer(body)
                if reply is None:
                    self.close_connection = True
                else:
                    self._reply(reply)

            def _reply(self, reply: Reply) -> None:
                status, headers, content = reply
                data = json.dumps(content).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def answer(self, body: dict[str, Any]) -> Reply | None:
        with self._lock:
            self.num_requests += 1
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
            refusal = self.refusals.pop() if self.refusals else (0, {}, None)
        time.sleep(0.005)
        with self._lock:
            self.num_running -= 1
        if refusal is None or refusal[0]:
            return refusal
        if isinstance(body["inputs"], list):
            return 200, {}, [labels_of(item["text"]) for item in body["inputs"]]
        text = body["inputs"]["text"]
        if text == "slow":
            return LATE
        if not text:
            error = {"error": "the text is empty", "error_type": "invalid_input"}
            return 422, {}, error
        headers = {"X-Albert-Truncated-Tokens": "3", "X-Albert-Truncated-At": '{"inputs": 5}'}
        return 200, headers if text == "long" else {}, [labels_of(text)]


@pytest.fixture
def service_double() -> Iterator[Service]:
    service = Service()
    service.start()
    yield service
    service.stop()


@contextmanager
def scorer_of(service: Service, **options: Any) -> Iterator[RemoteScorer]:
    with RemoteScorer(service.url, "text-classification", **options) as scorer:
        yield scorer


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"text": f"text {number}"} for number in range(count)]


Score = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def score(service_double: Service, tmp_path: Path) -> Score:
    """Scores rows by the service, and gives the results."""

    def run(rows: list[dict[str, Any]], num_concurrent: int = 8) -> list[dict[str, Any]]:
        source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
        with scorer_of(service_double, num_concurrent=num_concurrent) as scorer:
            score_files(scorer, [source], output, ScoreOptions(keep=[]))
        return read_jsonl(output)

    return run


def test_rows_are_answered_in_order_with_bounded_concurrency(
    score: Score, service_double: Service
) -> None:
    rows = [*rows_of(40), {"text": ""}, {"text": "long"}]
    *scored, refused, cut = score(rows, num_concurrent=3)
    assert [row["output"] for row in scored] == [labels_of(row["text"]) for row in rows[:40]]
    assert refused == {"error": "the text is empty", "error_type": "invalid_input"}
    assert (cut["truncated_tokens"], cut["truncated_at"]) == (3, {"inputs": 5})
    assert 1 < service_double.max_running <= 3


OVERLOADED: Reply = (429, {"Retry-After": "0"}, {"error": "full", "error_type": "overloaded"})
DRAINING: Reply = (503, {}, {"error": "draining", "error_type": "not_ready"})
LATE: Reply = (504, {}, {"error": "late", "error_type": "deadline"})
BROKEN: Reply = (500, {}, {"error": "it broke", "error_type": "engine", "request_id": "1"})
BAD_GATEWAY: Reply = (502, {}, "<h1>Bad Gateway</h1>")


@pytest.mark.parametrize("refusal", [OVERLOADED, DRAINING, LATE, BAD_GATEWAY, None])
def test_a_refusal_that_passes_is_waited_for(
    refusal: Reply | None, score: Score, service_double: Service
) -> None:
    service_double.refusals = [refusal] * 5
    assert all("output" in row for row in score(rows_of(10)))


def test_a_row_that_fails_or_is_always_late_is_an_error(
    score: Score, service_double: Service
) -> None:
    service_double.refusals = [BROKEN]
    [failed] = score(rows_of(1))
    assert failed["error"] == "it broke"
    first, *others = score([{"text": "slow"}, *rows_of(20)], num_concurrent=2)
    assert first == {"error": "late", "error_type": "deadline"}
    assert all("output" in row for row in others)


def test_an_error_that_is_not_of_a_row_ends_the_job(score: Score, service_double: Service) -> None:
    service_double.refusals = [(500, {}, "<h1>Internal Server Error</h1>")]
    with pytest.raises(RequestError, match="replied 500"):
        score(rows_of(1))
    service_double.refusals = [(401, {}, {"error": "no key", "error_type": "unauthorized"})]
    with pytest.raises(UnauthorizedError, match="no key"):
        score(rows_of(1))


def test_an_interrupt_ends_the_waits(service_double: Service, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", rows_of(4))
    busy = {"error": "full", "error_type": "overloaded"}
    service_double.refusals = [(429, {"Retry-After": "600"}, busy)] * 4
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    try:
        with scorer_of(service_double) as scorer:
            interrupt.start()
            with pytest.raises(KeyboardInterrupt):
                score_files(scorer, [source], tmp_path / "out.jsonl")
    finally:
        signal.signal(signal.SIGINT, before)
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.extended
def test_a_service_that_stays_away_ends_the_job_which_goes_on_later(tmp_path: Path) -> None:
    service = Service()
    service.start()
    source, output = write_jsonl(tmp_path / "in.jsonl", rows_of(60)), tmp_path / "out.jsonl"

    def score(is_stopped: Callable[[], bool]) -> int:
        with scorer_of(service, wait_s=1.0) as scorer:
            options = ScoreOptions(part_rows=20)
            summary = score_files(scorer, [source], output, options, is_stopped=is_stopped)
            return summary.num_resumed_rows

    def goes_away() -> bool:
        service.stop()
        return False

    with pytest.raises(ServiceUnavailableError, match="has not answered for"):
        score(goes_away)
    service.start()
    assert score(lambda: False) == 20
    service.stop()
    assert len(read_jsonl(output)) == 60


def test_another_model_ends_the_job(service_double: Service, tmp_path: Path) -> None:
    source, output = write_jsonl(tmp_path / "in.jsonl", rows_of(60)), tmp_path / "out.jsonl"

    def reloaded() -> bool:
        service_double.info["revision"] = "r2"
        return False

    options = ScoreOptions(part_rows=20)
    with (
        scorer_of(service_double) as scorer,
        pytest.raises(ChangedJobError, match="was replaced during the job"),
    ):
        score_files(scorer, [source], output, options, is_stopped=reloaded)
    with (
        scorer_of(service_double) as scorer,
        pytest.raises(ChangedJobError, match="the model is not"),
    ):
        score_files(scorer, [source], output, options)


def test_a_service_without_the_task_or_out_of_reach_is_refused(service_double: Service) -> None:
    with pytest.raises(ConfigError, match="has no fill-mask; it has text-classification"):
        RemoteScorer(service_double.url, "fill-mask")
    with pytest.raises(ServiceUnavailableError, match="has not answered for"):
        RemoteScorer(f"http://127.0.0.1:{free_port()}", "text-classification", wait_s=0.1)


@pytest.mark.parametrize(
    ("task", "item"),
    [
        ("fill-mask", {"text": "The [MASK] was [MASK]."}),
        ("text-classification", {"text": "A film.", "text_pair": "A book."}),
        ("question-answering", {"question": "Who?", "context": "Proust was a novelist."}),
        ("sentence-order", {"sentences": ["It rained.", "We stayed in.", "We played."]}),
        ("feature-extraction", {"text": "run " * 200, "parameters": {"truncation": True}}),
    ],
)
def test_a_service_answers_as_its_bundle_does(
    task: str, item: dict[str, Any], service: Running, bundle_dir: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [item, {"inputs": [5]}])
    score_files(LocalScorer.open(bundle_dir, task), [source], tmp_path / "local.jsonl")
    with RemoteScorer(service.url, task) as scorer:
        score_files(scorer, [source], tmp_path / "remote.jsonl")
    local, remote = read_jsonl(tmp_path / "local.jsonl"), read_jsonl(tmp_path / "remote.jsonl")
    assert local[1] == remote[1]
    assert local[0] == rounded(remote[0])


def test_the_notes_of_a_long_list_are_those_of_all_its_parts(
    service: Running, bundle_dir: Path, tmp_path: Path
) -> None:
    cut = (3, 35, 36, 69)
    inputs = ["[MASK] " + "run " * (200 if index in cut else 1) for index in range(70)]
    parameters = {"truncation": True, "targets": "supervolcanoes"}
    source = write_jsonl(tmp_path / "in.jsonl", [{"inputs": inputs, "parameters": parameters}])
    score_files(LocalScorer.open(bundle_dir, "fill-mask"), [source], tmp_path / "local.jsonl")
    with RemoteScorer(service.url, "fill-mask") as scorer:
        score_files(scorer, [source], tmp_path / "remote.jsonl")
    [local], [remote] = read_jsonl(tmp_path / "local.jsonl"), read_jsonl(tmp_path / "remote.jsonl")
    assert list(remote["truncated_at"]) == [f"inputs[{index}]" for index in cut]
    assert len(remote["warnings"]) == 1
    assert local == rounded(remote)


def rounded(value: Any) -> Any:
    """A value whose numbers are equal up to the last digits, which depend on the batch."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
