"""A service of two workers: shared weights, metrics, log, traces, and a worker that is killed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.albert_serve.support import (
    NUM_CALLERS,
    SERVICE,
    RunningService,
    constant_load,
    free_port,
    running_service,
    service_environment,
    wait_until_logged,
    wait_until_started,
    worker_pids,
)
from tests.devices import CUDA

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
NUM_REQUESTS = 24
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACING = "services: {albert_serve: {tracing: {exporter_type: in_memory, sample_rate: 1.0}}}"


@pytest.fixture(scope="module", params=["cpu"])
def workers(
    bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RunningService]:
    """A service of two workers on a device, with a log in JSON and an exporter of traces."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "bentoml.yaml").write_text(TRACING)
    environment = service_environment(bundle_dir, folder / "home") | {
        "ALBERT_SERVE_DEVICE": request.param,
        "ALBERT_SERVE_WORKERS": "2",
        "ALBERT_SERVE_CACHE": str(folder / "cache"),
        "ALBERT_SERVE_LOG_FORMAT": "json",
        "BENTOML_CONFIG": str(folder / "bentoml.yaml"),
    }
    with running_service(environment, folder) as service:
        wait_until_started(service, 2)
        yield service


def ask(url: str, number: int = 0) -> object:
    body = {"inputs": "The [MASK] run. " + "run " * (number % 5)}
    headers = {"X-Request-ID": f"job-{number}"}
    reply = httpx.post(f"{url}/fill-mask", json=body, headers=headers, timeout=30)
    assert reply.status_code == 200
    return reply.json()


def totals(url: str) -> defaultdict[str, float]:
    """The sum of each metric over all its labels."""
    sums: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


def test_workers_map_the_same_prepacked_weights(workers: RunningService) -> None:
    answers = [ask(workers.url) for _ in range(8)]
    assert all(answer == answers[0] for answer in answers)
    pids = worker_pids(workers)
    assert len(pids) == 2
    (entry,) = (workers.log_file.parent / "cache").glob("*/encoder.data")
    assert all(str(entry) in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


def test_both_workers_report_the_metrics_of_all_requests(workers: RunningService) -> None:
    before = totals(workers.url)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, [workers.url] * NUM_REQUESTS, range(NUM_REQUESTS)))
    for _ in range(4):  # either worker may reply
        growth = {name: value - before[name] for name, value in totals(workers.url).items()}
        assert growth["albert_serve_requests_total"] == NUM_REQUESTS
        assert growth["albert_serve_queue_delay_seconds_count"] == NUM_REQUESTS
        assert growth["albert_serve_batch_inputs_sum"] == NUM_REQUESTS
        num_tokens = growth["albert_serve_request_tokens_total"]
        assert growth["albert_serve_batch_tokens_sum"] == num_tokens > NUM_REQUESTS


def test_every_line_of_the_log_is_json_and_requests_have_their_ids(workers: RunningService) -> None:
    ask(workers.url, 1007)
    new_id = httpx.get(f"{workers.url}/info").headers["X-Request-ID"]
    httpx.get(f"{workers.url}/a%0a%7B%22forged%22:1%7D")
    httpx.get(f"{workers.url}/livez")
    for text in ("job-1007", new_id, "forged"):
        wait_until_logged(workers, text)
    # BentoML's command prints one line before the service starts.
    first, *lines = workers.log.splitlines()
    assert "Applying user config override" in first
    records = [json.loads(line) for line in lines]
    by_id = {record["request_id"]: record for record in records if "request_id" in record}
    record = by_id["job-1007"]
    assert (record["method"], record["path"], record["status"]) == ("POST", "/fill-mask", 200)
    assert record["message"].startswith("POST /fill-mask 200 ")
    assert record["duration_ms"] > 0
    assert by_id[new_id]["path"] == "/info"
    paths = {record["path"] for record in records if "path" in record}
    assert "/a%0A%7B%22forged%22%3A1%7D" in paths
    assert paths.isdisjoint({"/livez", "/readyz", "/metrics"})


def test_with_an_exporter_the_log_has_the_callers_trace_or_a_new_one(
    workers: RunningService,
) -> None:
    parent = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    traces = []
    for request_id, headers in (("in-a-trace", parent), ("untraced", {})):
        httpx.get(f"{workers.url}/info", headers={"X-Request-ID": request_id, **headers})
        wait_until_logged(workers, request_id)
        line = next(line for line in workers.log.splitlines() if request_id in line)
        traces.append(json.loads(line)["trace_id"])
    assert traces[0] == TRACE_ID != traces[1]
    assert re.fullmatch(r"[0-9a-f]{32}", traces[1])


@pytest.mark.parametrize("workers", ["cpu", CUDA], indirect=True)
def test_a_killed_worker_loses_only_its_own_requests_and_is_replaced(
    workers: RunningService,
) -> None:
    killed, survivor = worker_pids(workers)
    with constant_load(workers) as counts:
        time.sleep(0.3)
        psutil.Process(killed).kill()
        wait_until_started(workers, 3)
    assert counts[200] > 0
    assert counts.total() - counts[200] <= NUM_CALLERS
    assert {status for status in counts if isinstance(status, int)} == {200}
    assert survivor in worker_pids(workers)
    assert len(worker_pids(workers)) == 2


def test_an_invalid_setting_is_one_line_and_no_worker_starts(
    bundle_dir: Path, tmp_path: Path
) -> None:
    """BentoML would restart a failing worker forever."""
    variables = {"ALBERT_SERVE_API_KEYS": "secret"}
    run = subprocess.run(
        [sys.executable, "-m", "bentoml", "serve", SERVICE, "--port", str(free_port())],
        env=service_environment(bundle_dir, tmp_path) | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("error: ALBERT_SERVE_API_KEYS")
    assert "Traceback" not in run.stderr
    assert "Starting production" not in run.stderr
