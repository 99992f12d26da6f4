"""Workers that die: replaced, later and later; a service whose workers cannot start ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Set
from pathlib import Path

import psutil
import pytest

from albert_serve.server.bentoml import restarts
from albert_serve.server.bentoml.restarts import MAX_FAILED_STARTS, Restarts
from albert_serve.settings import SUPERVISOR_VARIABLE
from tests.albert_serve.support import (
    QUICK_RESTARTS,
    SERVICE,
    Running,
    before_each_program,
    free_port,
    running_service,
    service_environment,
    wait_until_ready,
    workers_of,
)

# Python runs it before a program: workers end at once; the supervisor restarts them at once.
FAILING_WORKERS = f"""
import os
if {SUPERVISOR_VARIABLE!r} in os.environ:
    os.write(2, b"this worker cannot start\\n")
    os._exit(3)
{QUICK_RESTARTS}
"""


class Deaths:
    """Workers of one service that start and die, by a clock that the test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.restarts = Restarts(folder)
        self.now_s = 1000.0
        self.signals: list[tuple[int, int]] = []
        self._folder = folder
        self._pid = 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(os, "kill", lambda *signal: self.signals.append(signal))
        monkeypatch.setattr(restarts, "_END_AFTER_S", 0)

    def start(self, served_s: float | None) -> int:
        """Start a worker that has served for so long; None: it does not serve yet."""
        self._pid += 1
        self.restarts.add(self._pid)
        if served_s is not None:
            file = self._folder / f"started-{self._pid}"
            file.touch()
            os.utime(file, (time.time() - served_s,) * 2)
        return self._pid

    def die(
        self, *served_s: float | None, num_workers: int = 1, running: Set[int] = frozenset()
    ) -> None:
        """Start workers that die together after serving for so long; None: they never served."""
        for age_s in served_s:
            self.start(age_s)
        self.restarts.keep(running, num_workers)

    def delay_s(self) -> float:
        """The time until the next worker is due."""
        begin_s = self.now_s
        while not self.restarts.are_due:
            self.now_s += 0.5
            assert self.now_s < begin_s + 100
        return self.now_s - begin_s


@pytest.fixture
def deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deaths:
    return Deaths(tmp_path, monkeypatch)


def test_restarts_wait_longer_after_each_early_death_and_not_after_a_late_one(
    deaths: Deaths,
) -> None:
    delays_s = []
    for _ in range(8):
        deaths.die(5)
        delays_s.append(deaths.delay_s())
    assert delays_s == [0, 1, 2, 4, 8, 16, 30, 30]
    deaths.die(61)
    assert deaths.delay_s() == 0
    deaths.die(5)
    assert deaths.delay_s() == 0
    deaths.die(5)
    assert deaths.delay_s() == 1
    assert not deaths.signals


def test_workers_that_die_together_delay_the_next_once(deaths: Deaths) -> None:
    deaths.die(5, 5, 5, 5, num_workers=4)
    assert deaths.delay_s() == 0


def test_five_workers_in_a_row_that_never_serve_end_the_service(
    deaths: Deaths, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(MAX_FAILED_STARTS - 1):
        deaths.die(None)
    deaths.die(5)
    for _ in range(MAX_FAILED_STARTS - 1):
        deaths.die(None)
    assert deaths.delay_s() > 0
    deaths.die(None)
    deaths.now_s += 1000
    assert not deaths.restarts.are_due
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert error.startswith("workers died 5 times in a row before they served")
    wait_for_signals(deaths)
    assert deaths.signals == [(os.getpid(), signal.SIGTERM)]


def wait_for_signals(deaths: Deaths) -> None:
    give_up_s = time.time() + 20
    while not deaths.signals:
        assert time.time() < give_up_s
        time.sleep(0.01)


def test_workers_that_fail_together_are_one_failure(deaths: Deaths) -> None:
    delays_s = []
    for _ in range(3 + MAX_FAILED_STARTS - 1):
        deaths.die(None, None, None, None, num_workers=4)
        delays_s.append(deaths.delay_s())
    assert delays_s == [0, 1, 2, 4, 8, 16, 30]
    assert not deaths.signals
    deaths.die(None, None, None, None, num_workers=4)
    wait_for_signals(deaths)


def test_a_service_goes_on_while_one_worker_serves(deaths: Deaths) -> None:
    serving, starting = deaths.start(300), deaths.start(None)
    for _ in range(20):
        deaths.die(None, num_workers=4, running={serving, starting})
        deaths.delay_s()
    deaths.die(None, num_workers=4, running={serving, starting})
    assert deaths.delay_s() == 30
    assert not deaths.signals


def test_a_service_ends_although_a_worker_is_still_starting(deaths: Deaths) -> None:
    starting = deaths.start(None)
    for _ in range(1 + MAX_FAILED_STARTS):
        deaths.die(None, num_workers=2, running={starting})
    wait_for_signals(deaths)
    assert not deaths.restarts.are_due


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_is_replaced_at_once_and_a_second_one_later(
    bundle_dir: Path, tmp_path: Path
) -> None:
    environment = service_environment(bundle_dir, tmp_path / "home")
    with running_service(environment, tmp_path, ("albert_serve", "serve")) as service:
        first = kill_worker(service)
        wait_until_ready(service)
        assert "the next starts in" not in service.log
        second = kill_worker(service)
        wait_until_ready(service)
        (third,) = workers_of(service)
        assert len({first, second, third}) == 3
        assert f"worker {second} was ended by SIGKILL" in service.log
        assert service.log.count("in a row within 60 s of service; the next starts in 1 s") == 1
        assert service.process.poll() is None


def kill_worker(service: Running) -> int:
    """Kill the worker, and return its PID when the supervisor knows."""
    (pid,) = workers_of(service)
    worker = psutil.Process(pid)
    worker.kill()
    worker.wait(timeout=20)
    return pid


def test_a_service_whose_workers_cannot_start_ends_with_one_error_and_status_1(
    bundle_dir: Path, tmp_path: Path
) -> None:
    command = ["bentoml", "serve", SERVICE, "--port", str(free_port()), "--host", "127.0.0.1"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=service_environment(bundle_dir, tmp_path / "home")
        | before_each_program(tmp_path, FAILING_WORKERS),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("this worker cannot start") == 2
    assert done.stdout.count("workers died 2 times in a row before they served") == 1
    assert "Traceback" not in done.stdout
