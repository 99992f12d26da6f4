"""Changes to BentoML's supervisor process, which starts and watches the workers.

The supervisor is circus' arbiter, and BentoML has no settings for these; so circus' classes are
patched in that process before it makes its watchers. The versions are pinned; each patch is tested.
"""

from __future__ import annotations

import signal
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

import bentoml.serving
import psutil
from circus.controller import Controller  # type: ignore[import-untyped]
from circus.process import Process  # type: ignore[import-untyped]
from circus.watcher import Watcher  # type: ignore[import-untyped]
from prometheus_client.multiprocess import mark_process_dead

_CHECK_EVERY_MS: Final = 1000


def supervise() -> None:
    """Forward SIGHUP to the workers, and restart dead workers within a second, in containers too.

    By default BentoML replaces all workers on SIGHUP, checks for dead ones every 10 s, never
    restarts them in a container, and keeps their gauges.
    """
    Watcher.__init__ = partialmethod(Watcher.__init__, send_hup=True)
    Process.spawn = partialmethod(_spawn_with_hup_blocked, Process.spawn)
    Controller.start = partialmethod(_start_checking_often, Controller.start)
    vars(bentoml.serving)["running_inside_container"] = lambda: False


def _spawn_with_hup_blocked(process: Process, spawn: Any) -> None:
    """Start a worker with SIGHUP blocked, which is fatal before the worker handles it."""
    _remove_dead_gauges(Path(process.env["PROMETHEUS_MULTIPROC_DIR"]))
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
