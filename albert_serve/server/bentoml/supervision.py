"""Changes to BentoML's supervisor process, which starts and watches the workers.

The supervisor is circus' arbiter, and BentoML has no settings for these; so circus' classes are
patched in that process before it makes its watchers. The versions are pinned; each patch is tested.
A worker watches its supervisor in turn (`end_with`).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import shutil
import signal
import tempfile
import threading
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

import bentoml.serving
import psutil
from circus.controller import Controller  # type: ignore[import-untyped]
from circus.process import Process  # type: ignore[import-untyped]
from circus.watcher import Watcher  # type: ignore[import-untyped]
from prometheus_client.multiprocess import mark_process_dead

from albert_serve.settings import (
    METRICS_VARIABLE,
    SUPERVISOR_VARIABLE,
    metrics_folder,
    supervisor_pid,
)

SERVICE_NAME: Final = "albert_serve"
_CHECK_EVERY_MS: Final = 1000
_MAX_FAILED_STARTS: Final = 5
_STARTED: Final = "started-{}"
_END_AFTER_S: Final = 0.5
# What it means if a signal that we did not send ends a worker.
_REASONS: Final[dict[int, str]] = {
    signal.SIGBUS: (
        "a file of a served bundle was cut short or written over in place; replace bundles by "
        "renaming them"
    ),
    signal.SIGKILL: "it was killed by someone, or by the system for want of memory",
}
_logger = logging.getLogger(__name__)


def supervise() -> None:
    """Forward SIGHUP to the workers, and restart dead workers within a second, in containers too.

    By default BentoML replaces all workers on SIGHUP, checks for dead ones every 10 s, never
    restarts them in a container, keeps their gauges, has one folder of metrics for all services of
    a user, and restarts workers that cannot start for ever.
    """
    # Until circus handles it, it would end the process, whose PID is known by now.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    metrics = Path(tempfile.mkdtemp(prefix="albert-serve-metrics-"))
    starts = Starts(metrics)
    atexit.register(starts.exit)
    atexit.register(shutil.rmtree, metrics, ignore_errors=True)
    Watcher.__init__ = partialmethod(_watch, Watcher.__init__, metrics)
    Watcher.reap_process = partialmethod(_reap, Watcher.reap_process)
    Process.spawn = partialmethod(_spawn, Process.spawn, starts)
    Controller.start = partialmethod(_start_checking_often, Controller.start)
    vars(bentoml.serving)["running_inside_container"] = lambda: False


class Starts:
    """The starts of workers: too many failures in a row end the service.

    Args:
        folder: where each worker that has started leaves a file (`mark_started`).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_started = 0
        self._num_failed = 0
        self._is_failed = False

    def count(self, num_workers: int) -> None:
        """Count a start, and end the service if workers died again and again before they served."""
        num_started = len(list(self._folder.glob(_STARTED.format("*"))))
        self._num_failed = 0 if num_started > self._num_started else self._num_failed + 1
        self._num_started = num_started
        if self._num_failed < num_workers + _MAX_FAILED_STARTS:
            return
        if not self._is_failed:
            _logger.error(
                "%d workers in a row died before they served; the log has why: the service ends",
                _MAX_FAILED_STARTS,
            )
        self._is_failed = True
        # Later, because circus drops a signal that comes while it starts a worker.
        threading.Timer(_END_AFTER_S, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def exit(self) -> None:
        """End the process with status 1 if the workers failed; BentoML would end it with 0."""
        if self._is_failed:
            logging.shutdown()
            os._exit(1)


def mark_started() -> None:
    """Tell the supervisor that this worker serves."""
    folder = metrics_folder()
    if folder is not None and supervisor_pid() is not None:
        (folder / _STARTED.format(os.getpid())).touch()


async def end_with(supervisor: int) -> None:
    """Wait until the supervisor has died, and end this worker, which would keep its port."""
    while os.getppid() == supervisor:
        await asyncio.sleep(_CHECK_EVERY_MS / 1000)
    _logger.error("the supervisor, process %d, has died: this worker ends", supervisor)
    os.kill(os.getpid(), signal.SIGTERM)


def _watch(watcher: Watcher, init: Any, metrics: Path, *args: Any, **options: Any) -> None:
    """Make a watcher whose workers get SIGHUP; ours know their supervisor and its metrics.

    Workers of another service, which composes ours, share BentoML's metrics with it, and never
    tell that they have started.
    """
    env = dict(options.pop("env", None) or {})
    if SERVICE_NAME in (options.get("args") or ()):
        env |= {METRICS_VARIABLE: str(metrics), SUPERVISOR_VARIABLE: str(os.getpid())}
    init(watcher, *args, **options, env=env, send_hup=True)


def _spawn(process: Process, spawn: Any, starts: Starts) -> None:
    """Start a worker with SIGHUP blocked, which is fatal before the worker handles it."""
    if SUPERVISOR_VARIABLE in process.env:
        starts.count(process.watcher.numprocesses)
    _remove_dead_gauges(Path(process.env[METRICS_VARIABLE]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # the child inherits it
    try:
        spawn(process)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def _reap(watcher: Watcher, reap: Any, pid: int, status: int | None = None) -> None:
    """Forget a worker that has died, and log the reason where a signal ended it."""
    if status is not None and os.WIFSIGNALED(status) and not watcher.is_stopping():
        number = os.WTERMSIG(status)
        if number in _REASONS:
            name = signal.Signals(number).name
            _logger.error("worker %d was ended by %s: %s", pid, name, _REASONS[number])
    reap(watcher, pid, status)


def _remove_dead_gauges(metrics: Path) -> None:
    """Remove the gauges of killed workers, which would otherwise be counted for ever."""
    for file in metrics.glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        try:
            is_dead = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            is_dead = True
        if is_dead:
            mark_process_dead(pid, str(metrics))  # type: ignore[no-untyped-call]


def _start_checking_often(controller: Controller, start: Any) -> Any:
    controller.check_delay = _CHECK_EVERY_MS
    return start(controller)
