"""Several worker processes: all answer, and share one copy of the packed weights."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from tests.albert_serve.support import (
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


def ask(url: str) -> object:
    body = {"inputs": "the first [MASK] of the year", "parameters": {"top_k": 2}}
    reply = httpx.post(f"{url}/fill-mask", json=body, timeout=30)
    assert reply.status_code == 200
    return reply.json()
