"""Worker processes and their supervisor: shared weights, and what dies or cannot start."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.albert_serve.support import (
    NUM_CALLERS,
    SERVICE,
    Running,
    free_port,
    served,
    service_environment,
    under_load,
    wait_until_started,
    workers_of,
)
from tests.devices import CUDA

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BODY = {"inputs": "the first [MASK] of the year", "parameters": {"top_k": 2}}


# For `before_each_program`: no process may write more than 128 KB into a file.
@pytest.fixture(scope="module", params=["cpu"])
def workers(
    bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Running]:
    """A service of two workers on a device."""
    folder = tmp_path_factory.mktemp("workers")
    settings = {"DEVICE": request.param, "WORKERS": "2", "CACHE": str(folder / "cache")}
    with served(bundle_dir, folder, **settings) as service:
        wait_until_started(service, 2)
        yield service


def test_workers_map_the_same_packed_weights(workers: Running) -> None:
    answers = [ask(workers.url) for _ in range(8)]
    assert all(answer == answers[0] for answer in answers)
    pids = workers_of(workers)
    assert len(pids) == 2
    (entry,) = (workers.log_file.parent / "cache").glob("*/encoder.data")
    assert all(str(entry) in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


@pytest.mark.parametrize("workers", ["cpu", CUDA], indirect=True)
def test_a_killed_worker_loses_its_own_requests_and_is_replaced(workers: Running) -> None:
    killed, other = workers_of(workers)
    with under_load(workers) as seen:
        time.sleep(0.3)
        psutil.Process(killed).kill()
        wait_until_started(workers, 3)
    assert 200 in seen
    assert seen.total() - seen[200] <= NUM_CALLERS
    assert not {status for status in seen if isinstance(status, int)} - {200}
    assert other in workers_of(workers)
    assert len(workers_of(workers)) == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        # Before a worker starts: it would be started again and again.
        ({"ALBERT_SERVE_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}, "CUDA"),
        ({"ALBERT_SERVE_API_KEYS": "secret"}, "ALBERT_SERVE_API_KEYS"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    variables: dict[str, str], message: str, bundle_dir: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bentoml", "serve", SERVICE, "--port", str(free_port())],
        env=service_environment(bundle_dir, tmp_path) | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in done.stderr
    assert "Starting production" not in done.stderr


def ask(url: str) -> object:
    reply = httpx.post(f"{url}/fill-mask", json=BODY, timeout=30)
    assert reply.status_code == 200
    return reply.json()
