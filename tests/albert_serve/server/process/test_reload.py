"""`albert-serve reload` finds the service by its port, and signals nothing else."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.cli import main
from tests.albert_serve.support import (
    free_port,
    running_service,
    service_environment,
    wait_until_logged,
)


def test_a_reload_that_changes_nothing_says_so(
    bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home")
    with running_service(environment, tmp_path, ("albert_serve", "serve")) as service:
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
