"""A reload adds, replaces and removes hosted models, in this process and in a service's workers."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client import CollectorRegistry

from albert_serve.bundle.manifest import Bundle
from albert_serve.cli import main
from albert_serve.errors import NotFoundError
from albert_serve.server.metrics import Metrics
from albert_serve.server.models.registry import Models
from albert_serve.settings import Settings
from tests.albert_serve.server.models.shelves import (
    damage,
    load,
    put,
    reloaded,
    settings_of,
    truncate,
    wait_for,
)
from tests.albert_serve.support import (
    Running,
    free_port,
    served,
    under_load,
    wait_until_logged,
    wait_until_started,
    workers_of,
)


def answers_with(running: Running, revision: str) -> bool:
    """Whether all that answer have this revision: of several workers any may."""
    revisions = (httpx.get(f"{running.url}/info").json()["revision"] for _ in range(8))
    return all(answer == revision for answer in revisions)


def logged(running: Running, change: str, times: int) -> bool:
    return running.log.count(f"model served {change}") == times


def test_a_reload_adds_replaces_and_removes(
    shelf: Path, bundle_dir: Path, int8_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = load(settings_of(shelf))
    before = models.get("second").description.revision
    shutil.move(shelf / "first", shelf / ".first")
    put(bundle_dir, shelf / "second")
    shutil.copytree(int8_dir, shelf / "third")
    with caplog.at_level(logging.WARNING):
        reloaded(models)
    assert models.names == ["second", "third"]
    assert models.default.name == "second"
    revision = Bundle.open(bundle_dir).manifest.revision
    assert models.default.description.revision == revision != before
    assert f"model second is now revision {revision}" in caplog.text
    assert "model first is no longer served" in caplog.text
    with pytest.raises(NotFoundError):
        models.get("first")


def test_what_has_not_changed_stays_and_a_new_first_model_is_not_the_default(
    shelf: Path, int8_dir: Path
) -> None:
    models = load(settings_of(shelf))
    before = [models.get(name) for name in ("first", "second")]
    shutil.copytree(int8_dir, shelf / "another")
    reloaded(models)
    assert "another" in models.names
    assert models.default.name == "first"
    assert [models.get(name) for name in ("first", "second")] == before


def forget(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def leave(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("spoil", [damage, truncate, forget, leave])
def test_a_bundle_that_does_not_verify_changes_nothing(
    spoil: Callable[[Path], None],
    bundle_dir: Path,
    int8_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(bundle_dir, tmp_path / "tiny")
    registry = CollectorRegistry()
    settings = Settings(bundle=tmp_path / "tiny", num_threads=1)
    models = Models.load(settings, Metrics(registry))
    revision = models.default.description.revision
    put(int8_dir, tmp_path / "tiny")
    spoil(tmp_path / "tiny")
    reloaded(models)
    assert models.default.description.revision == revision
    assert "model tiny was not loaded, the current one stays in use: " in caplog.text
    labels = {"model": "tiny", "outcome": "rejected"}
    assert registry.get_sample_value("albert_serve_reloads_total", labels) == 1


def test_a_list_that_cannot_be_read_changes_nothing(
    bundle_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"models: {{a: {{bundle: {bundle_dir}}}}}")
    models = load(settings_of(file))
    file.write_text("models: [")
    reloaded(models)
    assert models.names == ["a"]
    assert "the reload failed; the current models stay in use: " in caplog.text


def test_hangup_reloads_every_worker_and_drops_nothing(
    bundle_dir: Path, int8_dir: Path, tmp_path: Path
) -> None:
    num_workers = 2
    place = tmp_path / "served"
    shutil.copytree(bundle_dir, place)
    with served(place, tmp_path, WORKERS=str(num_workers)) as running:
        first = Bundle.open(bundle_dir).manifest.revision
        second = Bundle.open(int8_dir).manifest.revision
        wait_until_started(running, num_workers)
        pids = workers_of(running)
        with under_load(running) as seen:
            turns = ((int8_dir, second), (bundle_dir, first), (int8_dir, second))
            for turn, (bundle, revision) in enumerate(turns, start=1):
                put(bundle, place)
                running.process.send_signal(signal.SIGHUP)
                # Of every worker: one that is still at it would find the next one half put.
                wait_for(functools.partial(logged, running, "is now", turn * num_workers), running)
                assert answers_with(running, revision)
            damage(place)
            running.process.send_signal(signal.SIGHUP)
            wait_for(functools.partial(logged, running, "was not loaded", num_workers), running)
            assert answers_with(running, second)
        assert set(seen) == {200}
        assert workers_of(running) == pids
        assert httpx.get(f"{running.url}/info").json()["model_id"] == "served"


def metrics_of(worker: int) -> Path:
    """The folder of a worker's metrics, from Linux' /proc."""
    variables = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    (folder,) = (each for each in variables if each.startswith(b"PROMETHEUS_MULTIPROC_DIR="))
    return Path(folder.partition(b"=")[2].decode())


def test_a_worker_that_was_killed_comes_back_as_the_others_are(
    bundle_dir: Path, int8_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bundles"
    shutil.copytree(bundle_dir, folder / "first")
    with served(folder, tmp_path, BUNDLE="", MODELS=str(folder), WORKERS="2") as running:
        wait_until_started(running, 2)
        killed, other = workers_of(running)
        shutil.copytree(int8_dir, folder / "another")
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: running.log.count("model another is now") == 2, running)
        gauges = metrics_of(killed)
        assert list(gauges.glob(f"gauge_live*_{killed}.db"))
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: len(set(workers_of(running)) - {killed}) == 2, running)
        assert other in workers_of(running)
        assert not list(gauges.glob(f"gauge_live*_{killed}.db"))
        wait_until_started(running, 3)
        # The first by name when the service began, and not the one that is first now.
        names = [httpx.get(f"{running.url}/info").json()["model_id"] for _ in range(16)]
        assert set(names) == {"first"}


def test_a_reload_that_changes_nothing_says_so(
    bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(bundle_dir, tmp_path, ("albert_serve", "serve")) as service:
        pid, port = service.process.pid, urlsplit(service.url).port
        assert f"process {pid}; albert-serve reload --port {port} reloads" in service.log
        assert main(["reload", "--port", str(port)]) == 0
        assert capsys.readouterr().out.startswith(f"process {pid} reloads its models")
        revision = Bundle.open(bundle_dir).manifest.revision
        wait_until_logged(
            service,
            f"the reload has changed nothing: model {bundle_dir.name} is revision {revision}",
        )


def test_a_reload_without_a_service_is_one_line(failure: Callable[..., str]) -> None:
    port = free_port()
    message = f"no albert-serve service of this user listens on port {port}. Name its port with"
    assert failure("reload", "--port", port).startswith(message)


def test_a_reload_does_not_signal_another_program(failure: Callable[..., str]) -> None:
    """SIGHUP would end this process, which listens on the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"listens on port {port}" in failure("reload", "--port", port)
