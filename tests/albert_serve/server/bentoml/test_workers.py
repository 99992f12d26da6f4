"""Worker processes and their supervisor: shared weights, metrics, signals, and what dies."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.albert_serve.support import (
    NUM_CALLERS,
    SERVICE,
    Running,
    before_each_program,
    free_port,
    running_service,
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
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))"


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


def test_a_service_has_metrics_of_its_own_in_files_that_have_their_room(
    workers: Running, service: Running
) -> None:
    """A file with holes would end the worker by SIGBUS when the disk is full."""
    before = num_asked(service.url), num_asked(workers.url)
    for _ in range(3):
        ask(workers.url)
    assert (num_asked(service.url), num_asked(workers.url)) == (before[0], before[1] + 3)
    files = list(metrics_folder(workers_of(workers)[0]).glob("*.db"))
    assert len(files) > 4
    for file in files:
        assert file.stat().st_blocks * 512 >= file.stat().st_size, file


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


def test_a_worker_that_was_killed_comes_back_as_the_others_are(
    bundle_dir: Path, int8_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bundles"
    shutil.copytree(bundle_dir, folder / "first")
    with served(folder, tmp_path, BUNDLE="", MODELS=str(folder), WORKERS="2") as running:
        wait_until_started(running, 2)
        killed, _ = workers_of(running)
        shutil.copytree(int8_dir, folder / "another")
        gauges = metrics_folder(killed)
        assert list(gauges.glob(f"gauge_live*_{killed}.db"))
        psutil.Process(killed).kill()
        wait_until_started(running, 3)
        assert not list(gauges.glob(f"gauge_live*_{killed}.db"))
        # The first by name when the service began, and not the one that is first now.
        names = [httpx.get(f"{running.url}/info").json()["model_id"] for _ in range(16)]
        assert set(names) == {"first"}


def test_without_room_for_metrics_the_service_has_none(bundle_dir: Path, tmp_path: Path) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home")
    environment |= before_each_program(tmp_path, FULL_DISK)
    with running_service(environment, tmp_path) as service:
        ask(service.url)
        assert httpx.get(f"{service.url}/metrics").status_code == 404
        assert service.log.count("This worker serves without metrics.") == 1
        assert "File too large" in service.log


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


def metrics_folder(worker: int) -> Path:
    return Path(psutil.Process(worker).environ()["PROMETHEUS_MULTIPROC_DIR"])


def num_asked(url: str) -> float:
    """Requests of fill-mask, by the service's own metrics."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name.endswith("request_total") and "fill-mask" in str(sample.labels)
    )
