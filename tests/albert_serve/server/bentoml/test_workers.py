"""Several worker processes: all answer, and share one copy of the packed weights."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.albert_serve.support import (
    QUICK_RESTARTS,
    before_each_program,
    running_service,
    service_environment,
    wait_until_started,
    workers_of,
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_map_the_same_packed_weights(bundle_dir: Path, tmp_path: Path) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home") | {
        "ALBERT_SERVE_WORKERS": "2",
        "ALBERT_SERVE_CACHE": str(tmp_path / "cache"),
    }
    with running_service(environment, tmp_path) as service:
        wait_until_started(service, 2)
        answers = [ask(service.url) for _ in range(8)]
        workers = workers_of(service)
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in workers]
    assert all(answer == answers[0] for answer in answers)
    assert len(workers) == 2
    (entry,) = (tmp_path / "cache").glob("*/encoder.data")
    assert all(str(entry) in mapped for mapped in maps)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_of_the_engine_yield_to_the_event_loop(bundle_dir: Path, tmp_path: Path) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home")
    with running_service(environment | {"ALBERT_SERVE_THREADS": "2"}, tmp_path) as service:
        (worker,) = workers_of(service)
        ask(service.url)
        own, counts = niceness(worker)
    lowered = min(own + 4, 19)
    assert counts.keys() == {own, lowered}
    assert counts[lowered] >= 2  # that of ONNX Runtime, and ours that calls it


def niceness(pid: int) -> tuple[int, Counter[int]]:
    """The nice value of a process's first thread, and how many threads have which."""
    counts = Counter(
        os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")
    )
    return os.getpriority(os.PRIO_PROCESS, pid), counts


def ask(url: str) -> object:
    body = {"inputs": "the first [MASK] of the year", "parameters": {"top_k": 2}}
    reply = httpx.post(f"{url}/fill-mask", json=body, timeout=30)
    assert reply.status_code == 200
    return reply.json()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_their_supervisor(bundle_dir: Path, tmp_path: Path) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home")
    with running_service(environment, tmp_path) as service:
        (worker,) = workers_of(service)
        service.process.kill()
        service.process.wait(timeout=20)
        give_up_s = time.monotonic() + 20
        while psutil.pid_exists(worker) and psutil.Process(worker).status() != "zombie":
            assert time.monotonic() < give_up_s, service.log
            time.sleep(0.1)
    with pytest.raises(httpx.ConnectError):
        httpx.get(service.url)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_service_ends_whose_weights_were_cut_short_in_place(
    bundle_dir: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundle_dir, bundle)
    environment = service_environment(bundle, tmp_path / "home")
    environment |= before_each_program(tmp_path, QUICK_RESTARTS)
    with running_service(environment, tmp_path) as service:
        (worker,) = workers_of(service)
        os.truncate(bundle / "model.safetensors", 100)
        with pytest.raises(httpx.TransportError):
            ask(service.url)
        assert service.process.wait(timeout=300) == 1
        assert service.log.count(f"worker {worker} was ended by SIGBUS: a file of a served") == 1
        assert service.log.count("died 2 times in a row before they served") == 1


@pytest.mark.extended
def test_services_of_one_user_have_metrics_of_their_own(bundle_dir: Path, tmp_path: Path) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with running_service(environment, tmp_path / "first") as first:
        for _ in range(3):
            ask(first.url)
        with running_service(environment, tmp_path / "second") as second:
            assert num_asked(second.url) == 0
            ask(second.url)
            assert num_asked(second.url) == 1
            assert num_asked(first.url) == 3


def num_asked(url: str) -> float:
    """Requests of fill-mask, by the service's own metrics."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name.endswith("request_total") and "fill-mask" in str(sample.labels)
    )
