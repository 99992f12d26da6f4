"""Several worker processes: all answer, and share one copy of the packed weights."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.albert_serve.support import (
    START_TIMEOUT_S,
    Running,
    running_service,
    service_environment,
)

WORKER = "_bentoml_impl.worker.service"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_map_the_same_packed_weights(bundle_dir: Path, tmp_path: Path) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home") | {
        "ALBERT_SERVE_WORKERS": "2",
        "ALBERT_SERVE_CACHE": str(tmp_path / "cache"),
    }
    with running_service(environment, tmp_path) as service:
        wait_until_started(service, 2)
        answers = [ask(service.url) for _ in range(8)]
        workers = [pid for pid in processes_under(service.process.pid) if is_worker(pid)]
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in workers]
    assert all(answer == answers[0] for answer in answers)
    assert len(workers) == 2
    (entry,) = (tmp_path / "cache").glob("*/encoder.data")
    assert all(str(entry) in mapped for mapped in maps)


def ask(url: str) -> object:
    body = {"inputs": "the first [MASK] of the year", "parameters": {"top_k": 2}}
    reply = httpx.post(f"{url}/fill-mask", json=body, timeout=30)
    assert reply.status_code == 200
    return reply.json()


def wait_until_started(service: Running, num_workers: int) -> None:
    """The first that is ready answers for all."""
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while service.log.count("Completed async startup hook") < num_workers:
        assert time.monotonic() < give_up_s, service.log
        time.sleep(0.1)


def is_worker(pid: int) -> bool:
    return WORKER in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def processes_under(pid: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in processes_under(child)]
