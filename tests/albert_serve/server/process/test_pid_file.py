"""The PID file: who holds it, and `albert-serve reload`, which reads it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.cli import main
from tests.albert_serve.support import (
    ROOT,
    free_port,
    running_service,
    service_environment,
    wait_until_logged,
)

# A process that holds a PID file until its input ends.
HOLDER = """
import sys; from pathlib import Path; from albert_serve.server.process.pid_file import hold_pid_file
hold_pid_file(Path(sys.argv[1])); print(flush=True); sys.stdin.read()
"""


def hold(file: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def test_a_reload_that_changes_nothing_says_so(
    bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failure: Callable[..., str],
) -> None:
    file = tmp_path / "run/albert serve.pid"
    environment = service_environment(bundle_dir, tmp_path / "home")
    command = ("albert_serve", "serve", "--pid-file", str(file))
    with running_service(environment, tmp_path, command) as service:
        pid = service.process.pid
        assert f"process {pid}; albert-serve reload --pid-file '{file}' reads" in service.log
        assert file.read_text() == f"{pid}\n"
        assert main(["reload", "--pid-file", str(file)]) == 0
        assert capsys.readouterr().out.startswith(f"process {pid} reads its models again")
        revision = Bundle.open(bundle_dir).manifest.revision
        name = bundle_dir.name
        wait_until_logged(
            service, f"the reload has changed nothing: model {name} is revision {revision}"
        )
    line = failure("reload", "--pid-file", file)
    assert line == f"no running service holds the PID file {file}"


def test_a_reload_signals_the_holder_alone(tmp_path: Path) -> None:
    file = tmp_path / "served.pid"
    with hold(file) as holder:
        assert main(["reload", "--pid-file", str(file)]) == 0
        assert holder.wait(timeout=30) == -signal.SIGHUP


def test_a_reload_signals_no_process_that_only_has_the_number(
    tmp_path: Path, failure: Callable[..., str]
) -> None:
    file = tmp_path / "served.pid"
    with hold(file) as holder:  # a service in another container, where our number is its own
        file.write_text(f"{os.getpid()}\n")
        line = failure("reload", "--pid-file", file)
        assert line == f"no running service holds the PID file {file}"
        holder.communicate()


def test_a_reload_without_a_service_is_one_line(
    tmp_path: Path, failure: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "served.pid"
    line = failure("reload", "--pid-file", file)
    assert line.startswith(f"no service with the PID file {file} was found: No such file")
    file.write_text(f"{os.getpid()}\n")  # of a process that was killed, and whose PID is used again
    assert failure("reload", "--pid-file", file) == f"no running service holds the PID file {file}"
    monkeypatch.setenv("ALBERT_SERVE_CACHE", str(tmp_path))
    line = failure("reload", "--port", "8080")
    assert line.startswith(f"no service with the PID file {tmp_path}/services/8080.pid was found: ")


def test_the_file_of_a_running_process_is_not_taken(
    bundle_dir: Path, tmp_path: Path, failure: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENTOML_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("the service was started"))
    file = tmp_path / "served.pid"
    options = ["serve", "--bundle", bundle_dir, "--port", free_port(), "--pid-file"]
    with hold(file) as holder:
        line = failure(*options, file)
        assert (
            line == f"{file} is the PID file of process {holder.pid}, which runs; name another file"
        )
        assert file.read_text() == f"{holder.pid}\n"
        holder.communicate()
    assert failure(*options, "/proc/served.pid").startswith(
        "the PID file /proc/served.pid cannot be written: "
    )


@pytest.mark.parametrize("variable", ["ALBERT_SERVE_CACHE", "ALBERT_SERVE_PID_FILE"])
def test_a_service_has_a_pid_file_by_its_port_or_its_setting(
    variable: str, bundle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setenv("BENTOML_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "execvpe", lambda *arguments: started.append(arguments[2]))
    monkeypatch.setenv(variable, str(tmp_path / "named"))
    port = free_port()
    main(["serve", "--bundle", str(bundle_dir), "--port", str(port)])
    expected = "named" if variable == "ALBERT_SERVE_PID_FILE" else f"named/services/{port}.pid"
    assert started[0]["ALBERT_SERVE_PID_FILE"] == str(tmp_path / expected)
