"""Metrics and the log, as Prometheus and a log collector get them.

Nothing waits for the reader of the log, no terminal obeys it, and it has callers' traces. The
dashboard asks for no metric that there is not.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from albert_serve.batching.queue import BatchReport
from albert_serve.server import logging as our_logging
from albert_serve.server.logging import (
    REQUEST_ID,
    JsonFormatter,
    LogOutput,
    QueuedHandler,
    RepeatedWarning,
)
from albert_serve.server.metrics import Metrics
from tests.albert_serve.support import (
    ROOT,
    Running,
    running_service,
    served,
    service_environment,
    wait_until_logged,
)

NUM_REQUESTS = 24
TIMEOUT_S = 20.0
LINE = "a" * 99
NUM_LINES = 5000
NOTICE = re.compile(r"(\d+) log lines were dropped")
DASHBOARD = ROOT / "deploy/grafana-dashboard.json"
_METRIC = re.compile(r"\b(?:albert_serve|bentoml_service)_\w+(?=[\[{,)]|$)")


@pytest.fixture(scope="module")
def workers(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two processes behind one port that have answered requests, and refused one."""
    folder = tmp_path_factory.mktemp("metrics")
    with served(
        bundle_dir, folder, WORKERS="2", MAX_QUEUE_TOKENS="400", LOG_FORMAT="json"
    ) as started:
        with ThreadPoolExecutor(4) as threads:
            replies = list(threads.map(ask, [started.url] * NUM_REQUESTS, range(NUM_REQUESTS)))
        assert replies == [200] * NUM_REQUESTS
        yield started


def ask(url: str, number: int) -> int:
    body = {"inputs": "The [MASK] run. " + "run " * (number % 5)}
    headers = {"X-Request-ID": f"metrics-{number}"}
    return httpx.post(f"{url}/fill-mask", json=body, headers=headers, timeout=30).status_code


def samples(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def total(url: str, name: str, **labels: str) -> float:
    """The sum of a metric over all its other labels; there is one at least."""
    values = [
        value
        for (metric, own), value in samples(url).items()
        if metric == name and labels.items() <= own
    ]
    assert values, (name, labels)
    return sum(values)


def test_every_request_is_counted_once_whichever_process_answers(workers: Running) -> None:
    for _ in range(4):  # one process or the other
        url = workers.url
        assert total(url, "albert_serve_requests_total", task="fill-mask") == NUM_REQUESTS
        assert total(url, "albert_serve_queue_delay_seconds_count") == NUM_REQUESTS
        assert total(url, "albert_serve_batch_inputs_sum") == NUM_REQUESTS
        tokens = total(url, "albert_serve_request_tokens_total")
        assert total(url, "albert_serve_batch_tokens_sum") == tokens > NUM_REQUESTS


def test_each_event_is_counted_by_its_task_from_0() -> None:
    registry = CollectorRegistry()
    observer = Metrics(registry).observer("tiny", "fp32", ["fill-mask", "sentence-order"])
    observer.queued("fill-mask", 7)
    for _ in range(2):
        observer.shed("fill-mask")
    observer.expired("fill-mask")
    for _ in range(3):
        observer.cancelled("fill-mask")
    delays_s = {"fill-mask": [0.25, 0.5], "sentence-order": [1.0]}
    sizes: Any = {"num_inputs": 3, "num_tokens": 20, "num_padded_tokens": 24}
    observer.batch(BatchReport(**sizes, engine_s=0.5, queue_delays_s=delays_s))
    counts = {
        ("requests_total", "fill-mask", None): 1,
        ("request_tokens_total", "fill-mask", None): 7,
        ("requests_given_up_total", "fill-mask", "shed"): 2,
        ("requests_given_up_total", "fill-mask", "expired"): 1,
        ("requests_given_up_total", "fill-mask", "cancelled"): 3,
        ("requests_given_up_total", "sentence-order", "shed"): 0,
        ("queue_delay_seconds_sum", "fill-mask", None): 0.75,
        ("queue_delay_seconds_sum", "sentence-order", None): 1,
        ("engine_seconds_sum", None, None): 0.5,
        ("batch_tokens_sum", None, None): 20,
        ("batch_inputs_sum", None, None): 3,
        ("padding_tokens_total", None, None): 4,
    }
    for (name, task, reason), expected in counts.items():
        labels = {"model": "tiny", "task": task, "reason": reason}
        present = {key: value for key, value in labels.items() if value is not None}
        assert registry.get_sample_value(f"albert_serve_{name}", present) == expected, name
    served_model = {"model": "tiny", "precision": "fp32"}
    assert registry.get_sample_value("albert_serve_model", served_model) == 1


def test_the_dashboard_asks_for_metrics_that_exist_with_labels_that_they_have(
    workers: Running,
) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    labels: dict[str, set[str]] = {}
    for name, own in samples(workers.url):
        labels.setdefault(name, {"instance"}).update(label for label, _ in own)
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > len(dashboard["panels"]) > 5
    for expression in expressions:
        names = _METRIC.findall(expression)
        assert names
        known = set.union(*(labels[name] for name in names))
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        matched = re.findall(r"[{,]\s*(\w+)(?:=~|!~|!=|=)\"", expression)
        used = {label.strip() for group in grouped for label in group.split(",")} | set(matched)
        assert used <= known, expression
    for variable in dashboard["templating"]["list"]:
        assert set(_METRIC.findall(variable["query"])) <= set(labels)


def test_every_line_of_the_log_is_json_and_requests_have_their_ids(workers: Running) -> None:
    made = httpx.get(f"{workers.url}/info").headers["X-Request-ID"]
    httpx.get(f"{workers.url}/a%0a%7B%22forged%22:1%7D")
    httpx.get(f"{workers.url}/livez")
    wait_until_logged(workers, "forged")
    wait_until_logged(workers, made)
    lines = [json.loads(line) for line in workers.log.splitlines()]
    by_id = {line["request_id"]: line for line in lines if "request_id" in line}
    assert {f"metrics-{number}" for number in range(NUM_REQUESTS)} <= by_id.keys()
    one = by_id["metrics-3"]
    assert (one["method"], one["path"], one["status"]) == ("POST", "/fill-mask", 200)
    assert one["duration_ms"] > 0
    assert by_id[made]["path"] == "/info"
    paths = {line["path"] for line in lines if "path" in line}
    assert "/a%0A%7B%22forged%22%3A1%7D" in paths
    assert paths.isdisjoint({"/livez", "/readyz", "/metrics"})


@given(st.text(), st.text(min_size=1))
def test_a_record_is_one_line_of_json(message: str, reason: str) -> None:
    fields = {"created": 1.5, "levelname": "INFO", "trace_msg": "[trace=a,span=b]", "status": 404}
    record = logging.makeLogRecord({"msg": "%s", "args": (message,), "name": "x", **fields})
    try:
        raise ValueError(reason)
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    context = REQUEST_ID.set("7")
    line = JsonFormatter().format(record)
    REQUEST_ID.reset(context)
    assert len(line.splitlines()) == 1
    parsed: dict[str, Any] = json.loads(line)
    assert reason in parsed.pop("exception")
    assert parsed == {
        "time": "1970-01-01T00:00:01.500+00:00",
        "level": "INFO",
        "logger": "x",
        "message": message,
        "request_id": "7",
        "status": 404,
        "trace_id": "a",
        "span_id": "b",
    }


def test_a_repeated_warning_is_one_line_in_10_s_with_the_number_of_events(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=5.0)
    monkeypatch.setattr(our_logging, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    warning = RepeatedWarning(logging.getLogger("albert_serve"), "%d rejected by %s")
    for now_s in (5.0, 6.0, 14.9, 15.0, 24.9):
        clock.now_s = now_s
        warning.log(f"{now_s}")
    assert caplog.messages == ["1 rejected by 5.0", "3 rejected by 15.0"]


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
    own_lines = [line for line in text.splitlines() if not NOTICE.match(line)]
    assert own_lines == [LINE] * num_lines
    logger.warning("then")
    assert os.read(reading, 1 << 20) == b"then\n"


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
WITH_EXPORTER = """
services:
  albert_serve:
    tracing:
      exporter_type: in_memory
      sample_rate: 1.0
"""


def trace_of(running: Running, request_id: str, **headers: str) -> str:
    """Send a request; return the trace in its line of the log."""
    httpx.get(f"{running.url}/info", headers={"X-Request-ID": request_id, **headers})
    wait_until_logged(running, request_id)
    line = next(line for line in running.log.splitlines() if request_id in line)
    return str(json.loads(line)["trace_id"])


def test_with_an_exporter_the_log_has_the_callers_trace(bundle_dir: Path, tmp_path: Path) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home")
    environment["ALBERT_SERVE_LOG_FORMAT"] = "json"
    file = tmp_path / "bentoml.yaml"
    file.write_text(WITH_EXPORTER)
    environment["BENTOML_CONFIG"] = str(file)
    with running_service(environment, tmp_path) as running:
        parent = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
        assert trace_of(running, "in-a-trace", traceparent=parent) == TRACE_ID
        own = trace_of(running, "untraced")
    assert re.fullmatch(r"[0-9a-f]{32}", own)
    assert own != TRACE_ID
