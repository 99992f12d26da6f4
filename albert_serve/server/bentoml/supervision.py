"""Changes to BentoML's supervisor process, which starts and watches the workers.

The supervisor is circus' arbiter, and BentoML has no settings for these; so circus' classes are
patched in that process before it makes its watchers. The versions are pinned; each patch is tested.
A worker watches its supervisor in turn (`end_with`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

import bentoml.serving
import psutil
from circus.controller import Controller  # type: ignore[import-untyped]
from circus.process import DEAD_OR_ZOMBIE, Process  # type: ignore[import-untyped]
from circus.watcher import Watcher  # type: ignore[import-untyped]
from prometheus_client.multiprocess import mark_process_dead
from tornado import gen

from albert_serve.server.bentoml.restarts import Restarts
from albert_serve.settings import (
    METRICS_VARIABLE,
    SUPERVISOR_VARIABLE,
    allocator_variables,
)

SERVICE_NAME: Final = "albert_serve"
_CHECK_EVERY_MS: Final = 1000
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
    a user, and restarts workers that die at once for ever, as fast as it can.
    """
    # Until circus handles it, it would end the process, whose PID is known by now.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    metrics = Path(tempfile.mkdtemp(prefix="albert-serve-metrics-"))
    restarts = Restarts(metrics)
    atexit.register(restarts.exit)
    atexit.register(shutil.rmtree, metrics, ignore_errors=True)
    Watcher.__init__ = partialmethod(_watch, Watcher.__init__, metrics)
    Watcher.reap_process = partialmethod(_reap, Watcher.reap_process)
    Watcher.manage_processes = partialmethod(_reap_first, Watcher.manage_processes)
    Watcher.spawn_processes = partialmethod(_start_due, Watcher.spawn_processes, restarts)
    Watcher.__len__ = _num_expected
    Process.spawn = partialmethod(_spawn, Process.spawn, restarts)
    Controller.start = partialmethod(_start_checking_often, Controller.start)
    vars(bentoml.serving)["running_inside_container"] = lambda: False


async def end_with(supervisor: int) -> None:
    """Wait until the supervisor has died, and end this worker, which would keep its port."""
    while os.getppid() == supervisor:
        await asyncio.sleep(_CHECK_EVERY_MS / 1000)
    _logger.error("the supervisor, process %d, has died: this worker ends", supervisor)
    os.kill(os.getpid(), signal.SIGTERM)


def _watch(watcher: Watcher, init: Any, metrics: Path, *args: Any, **options: Any) -> None:
    """Make a watcher whose workers get SIGHUP.

    Ours know their supervisor and its metrics, and have one heap. Workers of another
    service, which composes ours, share BentoML's metrics with it, and never tell that they have
    started.
    """
    env = dict(options.pop("env", None) or {})
    if SERVICE_NAME in (options.get("args") or ()):
        # glibc returns the free pages of its first heap; Python's own allocator keeps a megabyte
        # for each object that is left in it.
        env = allocator_variables() | env
        env |= {METRICS_VARIABLE: str(metrics), SUPERVISOR_VARIABLE: str(os.getpid())}
    init(watcher, *args, **options, env=env, send_hup=True)


@gen.coroutine
def _start_due(watcher: Watcher, start: Any, restarts: Restarts) -> Iterator[Any]:
    """Start the workers that are missing, of ours when they are due."""
    if _is_ours(watcher.env):
        restarts.keep(watcher.processes.keys(), watcher.numprocesses)
    if restarts.are_due or not _is_ours(watcher.env):
        yield start(watcher)


def _num_expected(watcher: Watcher) -> int:
    """Return the number of workers; circus ends at 0, as between a death and the next start."""
    is_waiting = _is_ours(watcher.env) and not watcher.is_stopped()
    return len(watcher.processes) or int(is_waiting)


def _spawn(process: Process, spawn: Any, restarts: Restarts) -> None:
    """Start a worker with SIGHUP blocked, which is fatal before the worker handles it."""
    _remove_dead_gauges(Path(process.env[METRICS_VARIABLE]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # the child inherits it
    try:
        spawn(process)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    if _is_ours(process.env):
        restarts.add(process.pid)


def _is_ours(env: Mapping[str, str] | None) -> bool:
    """Whether a worker with this environment is of this service."""
    return SUPERVISOR_VARIABLE in (env or {})


def _reap(watcher: Watcher, reap: Any, pid: int, status: int | None = None) -> None:
    """Forget a worker that has died, and log the reason where a signal ended it."""
    if status is not None and os.WIFSIGNALED(status) and not watcher.is_stopping():
        number = os.WTERMSIG(status)
        if number in _REASONS:
            name = signal.Signals(number).name
            _logger.error("worker %d was ended by %s: %s", pid, name, _REASONS[number])
    reap(watcher, pid, status)


def _reap_first(watcher: Watcher, manage: Any) -> Any:
    """Reap workers that have just died: circus forgets these without their status."""
    for process in list(watcher.processes.values()):
        if process.status == DEAD_OR_ZOMBIE:
            with contextlib.suppress(ChildProcessError):
                watcher.reap_process(*os.waitpid(process.pid, 0))
    return manage(watcher)


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
