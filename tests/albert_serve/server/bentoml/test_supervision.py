"""Our own workers are watched and get a folder of metrics; those of other services do not."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from albert_serve.server.bentoml import supervision
from albert_serve.server.bentoml.restarts import Restarts
from albert_serve.server.bentoml.supervision import SERVICE_NAME
from albert_serve.settings import METRICS_VARIABLE, SUPERVISOR_VARIABLE


def environment_of(service: str, folder: Path) -> dict[str, str]:
    """The environment of a watcher of that service's workers; BentoML's folder is `shared`."""
    taken: dict[str, Any] = {}
    supervision._watch(
        None,
        lambda _, **options: taken.update(options),
        folder,
        name="service",
        args=["-m", "worker", "--service-name", service],
        env={METRICS_VARIABLE: "shared"},
    )
    assert taken["send_hup"] is True
    environment: dict[str, str] = taken["env"]
    return environment


def test_our_workers_know_their_supervisor(tmp_path: Path) -> None:
    expected = {METRICS_VARIABLE: str(tmp_path), SUPERVISOR_VARIABLE: str(os.getpid())}
    assert environment_of(SERVICE_NAME, tmp_path).items() >= expected.items()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="they are glibc's")
@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [("MALLOC_ARENA_MAX", "1", "4"), ("PYTHONMALLOC", "malloc", "pymalloc")],
)
def test_our_workers_have_one_heap_unless_the_environment_says_otherwise(
    name: str, ours: str, theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert environment_of(SERVICE_NAME, tmp_path)[name] == ours
    monkeypatch.setenv(name, theirs)
    assert environment_of(SERVICE_NAME, tmp_path)[name] == theirs


def test_workers_of_a_composing_service_are_as_bentoml_has_them(tmp_path: Path) -> None:
    assert environment_of("Search", tmp_path) == {METRICS_VARIABLE: "shared"}


@pytest.mark.parametrize(("service", "expected"), [(SERVICE_NAME, {7}), ("Search", set())])
def test_our_workers_alone_are_watched(service: str, expected: set[int], tmp_path: Path) -> None:
    restarts = Restarts(tmp_path)
    spawned: list[Any] = []
    env = {**environment_of(service, tmp_path), METRICS_VARIABLE: str(tmp_path)}
    process = SimpleNamespace(env=env, pid=7)
    supervision._spawn(process, spawned.append, restarts)
    assert spawned == [process]
    assert restarts._pids == expected
