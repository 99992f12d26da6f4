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
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

import bentoml.serving
import psutil
from circus.controller import Controller  # type: ignore[import-untyped]
from circus.process import Process  # type: ignore[import-untyped]
from circus.watcher import Watcher  # type: ignore[import-untyped]
from prometheus_client.multiprocess import mark_process_dead

from albert_serve.settings import SUPERVISOR_VARIABLE

_CHECK_EVERY_MS: Final = 1000
_METRICS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
_logger = logging.getLogger(__name__)


def supervise() -> None:
    """Forward SIGHUP to the workers, and restart dead workers within a second, in containers too.

    By default BentoML replaces all workers on SIGHUP, checks for dead ones every 10 s, never
    restarts them in a container, keeps their gauges, and has one folder of metrics for all
    services of a user.
    """
    metrics = tempfile.mkdtemp(prefix="albert-serve-metrics-")
    atexit.register(shutil.rmtree, metrics, ignore_errors=True)
    Watcher.__init__ = partialmethod(_watch, Watcher.__init__, metrics)
    Process.spawn = partialmethod(_spawn_with_hup_blocked, Process.spawn)
    Controller.start = partialmethod(_start_checking_often, Controller.start)
    vars(bentoml.serving)["running_inside_container"] = lambda: False


async def end_with(supervisor: int) -> None:
    """Wait until the supervisor has died, and end this worker, which would keep its port."""
    while os.getppid() == supervisor:
        await asyncio.sleep(_CHECK_EVERY_MS / 1000)
    _logger.error("the supervisor, process %d, has died: this worker ends", supervisor)
    os.kill(os.getpid(), signal.SIGTERM)


def _watch(watcher: Watcher, init: Any, metrics: str, *args: Any, **options: Any) -> None:
    """Make a watcher of workers that get SIGHUP and know their supervisor and its metrics."""
    supervisor = {_METRICS_VARIABLE: metrics, SUPERVISOR_VARIABLE: str(os.getpid())}
    env = {**(options.pop("env", None) or {}), **supervisor}
    init(watcher, *args, **options, env=env, send_hup=True)


def _spawn_with_hup_blocked(process: Process, spawn: Any) -> None:
    """Start a worker with SIGHUP blocked, which is fatal before the worker handles it."""
    _remove_dead_gauges(Path(process.env[_METRICS_VARIABLE]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # the child inherits it
    try:
        spawn(process)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


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
