"""Metrics and the log, as Prometheus and a log collector get them; the dashboard asks for no other.

Prometheus' own parser reads what the service writes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from albert_serve.server.logging import JsonFormatter
from tests.albert_serve.support import ROOT, Running, served, wait_until_logged

NUM_REQUESTS = 24
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
        num_batches = total(url, "albert_serve_engine_seconds_count")
        assert num_batches == total(url, "albert_serve_batch_tokens_count") <= NUM_REQUESTS
        assert total(url, "albert_serve_padding_tokens_total") < tokens


def test_what_did_not_happen_is_there_at_0(workers: Running) -> None:
    for reason in ("shed", "expired", "cancelled"):
        for task in ("question-answering", "sentence-order"):
            labels = {"reason": reason, "task": task}
            assert total(workers.url, "albert_serve_requests_given_up_total", **labels) == 0
    assert total(workers.url, "albert_serve_model", model="tiny", precision="fp32") == 1


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
        assert balanced(expression)
        names = _METRIC.findall(expression)
        assert names
        for name in names:
            assert name in labels, expression
        known = set.union(*(labels[name] for name in names))
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        matched = re.findall(r"[{,]\s*(\w+)(?:=~|!~|!=|=)\"", expression)
        used = {label.strip() for group in grouped for label in group.split(",")} | set(matched)
        assert used <= known, expression
    for variable in dashboard["templating"]["list"]:
        assert set(_METRIC.findall(variable["query"])) <= set(labels)


def balanced(expression: str) -> bool:
    without_text = re.sub(r'"[^"]*"', "", expression)
    return all(without_text.count(a) == without_text.count(b) for a, b in ("()", "{}", "[]"))


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


def test_a_line_of_the_text_log_has_the_requests_id(service: Running, client: httpx.Client) -> None:
    client.get("/info", headers={"X-Request-ID": "text-1"})
    wait_until_logged(service, "text-1")
    (line,) = [line for line in service.log.splitlines() if "text-1" in line]
    assert re.search(r"GET /info 200 \d+\.\d ms \(request text-1\)", line)


@given(st.text(), st.text(min_size=1))
def test_a_record_is_one_line_of_json(message: str, reason: str) -> None:
    record = logging.makeLogRecord({"msg": "%s", "args": (message,), "name": "x"})
    try:
        raise ValueError(reason)
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    line = JsonFormatter().format(record)
    assert len(line.splitlines()) == 1
    parsed: dict[str, Any] = json.loads(line)
    assert parsed["message"] == message
    assert reason in parsed["exception"]
